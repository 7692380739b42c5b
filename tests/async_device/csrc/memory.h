#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "async_device/csrc/access_log.h"
#include "async_device/csrc/stream.h"

namespace async_device {

/// Fills memory with NaN once, however many operations ask for it.
class Poison {
 public:
  Poison(char* host, int64_t bytes) : host_(host), bytes_(bytes) {}
  void fill();
  bool is_filled() const { return is_filled_; }

 private:
  char* host_;
  int64_t bytes_;
  std::once_flag once_;
  std::atomic<bool> is_filled_ = false;
};

/// Memory of one size. It never goes back to the system, so what points into it stays valid.
struct Block {
  char* address;  // on the device: the host dies of reading it, as with a GPU
  char* host;     // the same memory, as kernels see it
  int64_t bytes;
  Stream* owner;              // that it was allocated on, and is reused on
  std::set<Stream*> users{};  // others that use it, by record_stream
  bool is_stale = false;      // taken again and not used since: what it held is still there
  /// Fills the block for its new life. The operation that runs first fills it. It need not have
  /// been issued first: several streams may use parts of the block at once.
  std::shared_ptr<Poison> poison{};
  AccessLog accesses{};
};

/// The rules of CUDA's caching allocator. The stream that owns a freed block reuses it at once,
/// whatever is queued. A stream of `record_stream` delays that until its entries are done.
/// Among equal blocks the one freed last is reused first: a program that uses it too long by
/// mistake most likely still does. Sizes are rounded to 512 bytes and never split. Guarded by the
/// device's lock.
class Memory {
 public:
  /// @throws c10::Error if the device's 64 GiB of addresses are used up.
  Block* take(int64_t bytes, Stream* stream);

  /// Makes a block reusable at once, or @param after  these events.
  void give(Block* block, std::vector<EventPtr> after);

  /// True if blocks wait for events.
  bool has_waiting() const { return !waiting_.empty(); }

  /// Makes blocks reusable whose events have happened, and joins these events' clocks to `known`.
  void reclaim(VectorClock& known);

  int64_t live_bytes() const { return live_bytes_; }

  /// Returns the block that has this address of the device; null if none has.
  Block* find(const char* address) const;

  /// What is added to an address of the device to get the host's.
  ptrdiff_t host_offset();

 private:
  /// Allocates at the first use, so that processes forked before it share nothing.
  void map();

  char* next_ = nullptr;
  char* end_ = nullptr;
  ptrdiff_t host_offset_ = 0;
  std::map<std::pair<Stream*, int64_t>, std::vector<Block*>> free_;
  std::vector<std::pair<Block*, std::vector<EventPtr>>> waiting_;
  std::map<const char*, Block*> blocks_;  // all, by their first address
  int64_t live_bytes_ = 0;
};

}  // namespace async_device
