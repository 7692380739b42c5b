#include "dmuon/optim/batch_update.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

// Each call is seen by itself. Small matrices go in pieces of several, the 300 x 300 one by one.
TEST(BatchUpdate, MovesMomentumThenWeights) {
  for (const auto& [count, rows, cols] : {std::array{5, 3, 8}, {40, 8, 4}, {2, 300, 300}}) {
    const c10::AutoGradMode no_grad(false);
    const MuonOptions options = muon(0.05);
    const at::Tensor master = random_tensor({count, rows, cols}, 1);
    const at::Tensor momentum = at::zeros_like(master);
    const at::Tensor gradient = random_tensor({count, rows, cols}, 2);
    const at::Tensor first = master.clone();
    Plain expected_master = plain_of(master[1]);
    Plain expected_momentum = plain_of(momentum[1]);
    plain_muon_update(&expected_master, &expected_momentum, plain_of(gradient[1]),
                      plain_options(options, rows, cols));
    BatchUpdate update(group_of(options), {master, gradient, {momentum}, kApplies});
    EXPECT_EQ(momentum.count_nonzero().item<std::int64_t>(), 0);
    update.prepare();
    EXPECT_LE(largest_difference(momentum[1], expected_momentum), 2e-6);
    EXPECT_TRUE(master.equal(first));
    update.orthogonalise();
    EXPECT_LE(largest_difference(momentum[1], expected_momentum), 2e-6);
    EXPECT_TRUE(master.equal(first));
    update.apply();
    EXPECT_LE(largest_difference(master[1], expected_master), 2e-5) << rows;
    for (std::int64_t i = 0; i < count; ++i) EXPECT_FALSE(master[i].equal(first[i]));
  }
}

// Counts the memory of PyTorch's tensors that this thread makes and frees.
class Counted final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t num_bytes, std::size_t, std::size_t,
                         c10::Device) override {
    live_ += num_bytes;
    most_ = std::max(most_, live_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t most() const { return most_; }

 private:
  std::int64_t live_ = 0;
  std::int64_t most_ = 0;
};

TEST(BatchUpdate, RunsInTheMemoryOfOnePiece) {
  const c10::AutoGradMode no_grad(false);
  const auto bytes_of = [](std::int64_t count) {
    const at::Tensor master = random_tensor({count, 320, 320}, 1);
    BatchUpdate update(
        group_of(muon(0.05)),
        {master, random_tensor({count, 320, 320}, 2), {at::zeros_like(master)}, kApplies});
    const auto counted = std::make_shared<Counted>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counted);
    update.run();
    return counted->most();
  };
  const std::int64_t one = bytes_of(1);
  EXPECT_GE(one, 4 * 320 * 320);
  EXPECT_EQ(bytes_of(12), one);
}

TEST(BatchUpdate, RunsPieceByPieceToTheSameBits) {
  for (const auto& [count, rows, cols] : {std::array{5, 3, 8}, {40, 8, 4}, {3, 300, 300}}) {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor gradient = random_tensor({count, rows, cols}, 2);
    const auto updated = [&](bool runs) {
      const at::Tensor master = random_tensor({count, rows, cols}, 1);
      const at::Tensor momentum = at::zeros_like(master);
      BatchUpdate update(group_of(muon(0.05)), {master, gradient, {momentum}, kApplies});
      if (runs) {
        update.run();
      } else {
        update.prepare();
        update.orthogonalise();
        update.apply();
      }
      return std::pair{master, momentum};
    };
    const auto [master, momentum] = updated(false);
    const auto [same_master, same_momentum] = updated(true);
    EXPECT_TRUE(same_master.equal(master)) << rows;
    EXPECT_TRUE(same_momentum.equal(momentum)) << rows;
  }
}

// Before anything moves. The user called no function by the name of orthogonalize.
TEST(BatchUpdate, NamesTheStepInErrors) {
  const at::Tensor x = at::zeros({1, 3, 4});
  const auto message_of = [&](const MuonGroup& group) -> std::string {
    try {
      const BatchUpdate update(group, {x, x, {x}, kApplies});
    } catch (const core::InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  MuonGroup group = group_of(muon(0.05));
  group.choices[{3, 4}].backend = "another";
  EXPECT_EQ(message_of(group).find("Muon.step: choice.backend must be one of "), 0);
  group.iteration.eps = -2;
  EXPECT_EQ(message_of(group), "Muon.step: eps must be at least 0 and finite; got -2");
}

// A matrix's update is the same alone, among others, and in blocks of columns of a wider one: by
// pieces of several matrices and of one.
TEST(BatchUpdate, GivesEachPieceItsState) {
  const c10::AutoGradMode no_grad(false);
  for (const bool batched : {true, false}) {
    MuonGroup group{std::make_shared<Rows>(), {}};
    group.iteration.coefficients = kCoefficients;
    group.choices[{4, 6}] = {"cpu", newton_schulz::Form::kDirect, batched, 0};
    const auto updated = [&](const at::Tensor& gradient, std::int64_t column_blocks) {
      const at::Tensor master = at::zeros_like(gradient);
      std::vector<std::int64_t> sizes = group.rule->states().front().sizes_of(
          {gradient.size(0), gradient.size(1), gradient.size(2), column_blocks});
      sizes.insert(sizes.begin(), gradient.size(0));
      const at::Tensor rows = at::zeros(sizes);
      BatchUpdate update(group, {master, gradient, {rows}, kApplies}, column_blocks);
      update.prepare();
      update.orthogonalise();
      update.apply();
      return std::pair{master, rows};
    };
    const at::Tensor gradient = random_tensor({3, 4, 6}, 1);
    const auto [together, rows] = updated(gradient, 1);
    EXPECT_EQ(rows.sizes(), (at::IntArrayRef{3, 4, 1}));
    for (std::int64_t i = 0; i < 3; ++i) {
      const auto [alone, row] = updated(gradient.narrow(0, i, 1), 1);
      EXPECT_TRUE(alone.equal(together.narrow(0, i, 1)));
      EXPECT_TRUE(row.equal(rows.narrow(0, i, 1)));
    }
    // [1, 4, 18]: the three matrices side by side.
    const auto [wide, row] = updated(gradient.transpose(0, 1).reshape({1, 4, 18}), 3);
    EXPECT_TRUE(wide.equal(together.transpose(0, 1).reshape({1, 4, 18})));
    EXPECT_TRUE(row.equal(rows.transpose(0, 1).reshape({1, 4, 3})));
  }
}

}  // namespace
}  // namespace dmuon::optim
