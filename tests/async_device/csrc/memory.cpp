#include "async_device/csrc/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <iterator>

#include "async_device/csrc/settings.h"

namespace async_device {
namespace {

constexpr int64_t kArenaBytes = int64_t{1} << 36;
constexpr int64_t kRounding = 512;

}  // namespace

void Poison::fill() {
  std::call_once(once_, [this] { std::memset(host_, 0xFF, static_cast<size_t>(bytes_)); });
  is_filled_ = true;
}

void Memory::map() {
  const int file = memfd_create("async_device", 0);
  if (file < 0 || ftruncate(file, kArenaBytes) != 0) raise("no memory for the device");
  const auto mapped = [file](int protection) {
    return mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  };
  void* device = mapped(PROT_NONE);
  void* host = mapped(PROT_READ | PROT_WRITE);
  close(file);
  if (device == MAP_FAILED || host == MAP_FAILED) raise("the device's memory cannot be mapped");
  next_ = static_cast<char*>(device);
  end_ = next_ + kArenaBytes;
  host_offset_ = static_cast<char*>(host) - next_;
}

Block* Memory::take(int64_t bytes, Stream* stream) {
  bytes = (bytes + kRounding - 1) / kRounding * kRounding;
  Block* block = nullptr;
  if (auto& free = free_[{stream, bytes}]; !free.empty()) {
    block = free.back();
    free.pop_back();
    block->is_stale = true;
  } else {
    if (next_ == nullptr) map();
    if (end_ - next_ < bytes) raise("out of memory");
    block = new Block{next_, next_ + host_offset_, bytes, stream};
    blocks_[block->address] = block;
    next_ += bytes;
    if (settings().poison) std::memset(block->host, 0xFF, static_cast<size_t>(bytes));
  }
  live_bytes_ += bytes;
  return block;
}

Block* Memory::find(const char* address) const {
  const auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return address < block->address + block->bytes ? block : nullptr;
}

ptrdiff_t Memory::host_offset() {
  if (next_ == nullptr) map();
  return host_offset_;
}

void Memory::give(Block* block, std::vector<EventPtr> after) {
  live_bytes_ -= block->bytes;
  block->users.clear();
  if (after.empty()) {
    free_[{block->owner, block->bytes}].push_back(block);
  } else {
    waiting_.emplace_back(block, std::move(after));
  }
}

void Memory::reclaim(VectorClock& known) {
  std::erase_if(waiting_, [&](const auto& waiting) {
    const auto& [block, events] = waiting;
    for (const EventPtr& event : events) {
      if (!event->is_done) return false;
    }
    for (const EventPtr& event : events) known.join(event->clock);
    free_[{block->owner, block->bytes}].push_back(block);
    return true;
  });
}

}  // namespace async_device
