#include "dmuon/wire/pages.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>

namespace dmuon::wire {
namespace {

struct Pages {
  void* begin;
  std::size_t num_bytes;
};

void free_pages(void* context) {
  const std::unique_ptr<Pages> pages(static_cast<Pages*>(context));
  c10::profiledCPUMemoryReporter().Delete(pages->begin);
  munmap(pages->begin, pages->num_bytes);
}

class PageAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    c10::Allocator* const others = c10::GetDefaultCPUAllocator();
    if (num_bytes < kOwnPages) return others->allocate(num_bytes);
    auto pages = std::make_unique<Pages>();
    pages->num_bytes = num_bytes;
    pages->begin =
        mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages->begin == MAP_FAILED) return others->allocate(num_bytes);
    c10::profiledCPUMemoryReporter().New(pages->begin, num_bytes);
    void* const begin = pages->begin;
    return {begin, pages.release(), &free_pages, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // blocks have a context

  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

}  // namespace

c10::Allocator* page_allocator() {
  static PageAllocator allocator;
  return &allocator;
}

}  // namespace dmuon::wire
