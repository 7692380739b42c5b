#include "dmuon/newton_schulz/scratch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "dmuon/core/error.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

const at::TensorOptions kFloats = at::TensorOptions().dtype(at::kFloat);

// Takes memory as an update does, and returns the addresses.
std::vector<const void*> addresses(Scratch& memory) {
  const Scratch::Use use(memory);
  std::vector<Tensor> all;
  all.push_back(scratch_tensor({100, 3}, kFloats));
  scratch_tensor({200}, kFloats);  // freed at once
  all.push_back(scratch_tensor({0, 7}, kFloats));
  all.push_back(scratch_tensor({2, 3}, kFloats.dtype(at::kHalf)));
  std::vector<const void*> found;
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].fill_(static_cast<double>(i + 1));
    found.push_back(all[i].const_data_ptr());
  }
  EXPECT_EQ(all[0].sizes(), (at::IntArrayRef{100, 3}));
  EXPECT_EQ(all[2].scalar_type(), at::kHalf);
  EXPECT_TRUE(all[0].eq(1).all().item<bool>() && all[2].eq(3).all().item<bool>());  // apart
  return found;
}

TEST(Scratch, GivesTheSameCallsTheSameAddresses) {
  Scratch measured;
  addresses(measured);
  EXPECT_EQ(measured.taken_bytes(), 1536 + 1024 + 512);  // of 1200, 800 and 12 bytes
  Scratch memory(c10::kCPU, measured.taken_bytes());
  const std::vector<const void*> first = addresses(memory);
  EXPECT_EQ(addresses(memory), first);
  EXPECT_EQ(memory.taken_bytes(), measured.taken_bytes());
}

TEST(Scratch, RefusesMoreThanItHas) {
  Scratch memory(c10::kCPU, 1024);
  const Scratch::Use use(memory);
  scratch_tensor({256}, kFloats);
  EXPECT_THROW(scratch_tensor({1}, kFloats), core::InternalError);
}

TEST(Scratch, OutlivesItselfInItsTensors) {
  std::optional<Scratch> memory(std::in_place, c10::kCPU, 1024);
  Tensor kept;
  {
    const Scratch::Use use(*memory);
    kept = scratch_tensor({256}, kFloats);
  }
  memory.reset();
  EXPECT_EQ(kept.fill_(2).sum().item<float>(), 512);
}

TEST(Scratch, IsOfItsThreadWhileItIsUsed) {
  Scratch memory(c10::kCPU, 1024);
  EXPECT_FALSE(uses_scratch());
  const Tensor before = scratch_tensor({1}, kFloats);
  {
    const Scratch::Use use(memory);
    EXPECT_TRUE(uses_scratch());
    EXPECT_NE(scratch_tensor({1}, kFloats).const_data_ptr(), before.const_data_ptr());
  }
  EXPECT_EQ(memory.taken_bytes(), 512);
  scratch_tensor({1}, kFloats);
  EXPECT_EQ(memory.taken_bytes(), 512);
}

TEST(Scratch, KeepsTheFirstWorkOfPyTorch) {
  Scratch memory;
  uses_pytorch("works elsewhere");
  {
    const Scratch::Use use(memory);
    EXPECT_EQ(memory.work_of_pytorch(), "");
    uses_pytorch("multiplies");
    uses_pytorch("adds");
    EXPECT_EQ(memory.work_of_pytorch(), "multiplies");
  }
  const Scratch::Use use(memory);
  EXPECT_EQ(memory.work_of_pytorch(), "");
}

}  // namespace
}  // namespace dmuon::newton_schulz
