#include "dmuon/wire/pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "dmuon/wire/buffer.h"

namespace dmuon::wire {
namespace {

std::uintptr_t page_size() { return static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)); }

// True if the page at an address belongs to the process.
bool is_mapped(const void* address) {
  unsigned char resident = 0;
  const auto page = reinterpret_cast<std::uintptr_t>(address) / page_size() * page_size();
  return mincore(reinterpret_cast<void*>(page), 1, &resident) == 0 || errno != ENOMEM;
}

TEST(Pages, AreZerosAndLeaveTheProcessWithTheirBlock) {
  const std::size_t size = kOwnPages + 1;
  c10::DataPtr block = page_allocator()->allocate(size);
  auto* const bytes = static_cast<char*>(block.mutable_get());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes) % page_size(), 0U);
  EXPECT_TRUE(std::all_of(bytes, bytes + size, [](char byte) { return byte == 0; }));
  std::memset(bytes, 1, size);
  EXPECT_TRUE(is_mapped(bytes + size - 1));
  block.clear();
  EXPECT_FALSE(is_mapped(bytes));
  EXPECT_FALSE(is_mapped(bytes + size - 1));
}

TEST(Pages, AreForLargeBlocksAlone) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, kOwnPages - 1}) {
    c10::DataPtr block = page_allocator()->allocate(size);
    EXPECT_EQ(block.device(), c10::kCPU);
    if (size > 0) static_cast<char*>(block.mutable_get())[size - 1] = 1;
  }
}

TEST(Pages, AreCopiedWithTheirValues) {
  const std::vector<char> values(kOwnPages, 7);
  const c10::DataPtr copy = page_allocator()->clone(values.data(), values.size());
  EXPECT_EQ(std::memcmp(copy.get(), values.data(), values.size()), 0);
}

// What malloc would keep: a freed block lies in a heap below blocks that live.
TEST(Pages, OfPackedBuffersReturnToTheSystem) {
  const void* data = nullptr;
  {
    PackedBuffer buffer(std::make_shared<BufferPool>(c10::kCPU), std::int64_t{1} << 20, at::kFloat);
    buffer.allocate();
    data = buffer.flat().const_data_ptr();
    buffer.flat().zero_();
    buffer.release();
    EXPECT_TRUE(is_mapped(data)) << "the pool keeps it";
  }
  EXPECT_FALSE(is_mapped(data));
}

TEST(Pages, HoldWhatOwnersKeep) {
  const auto pool = std::make_shared<BufferPool>(c10::kCPU);
  const void* data = nullptr;
  {
    const at::Tensor tensor = pool->empty({512, 1024}, at::kFloat);
    EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{512, 1024}));
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
    tensor.fill_(1);
    data = tensor.const_data_ptr();
    EXPECT_EQ(pool->current_bytes(), 0);
  }
  EXPECT_FALSE(is_mapped(data));
}

}  // namespace
}  // namespace dmuon::wire
