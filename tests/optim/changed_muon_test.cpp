// What holds for every rule that changes the orthogonalised update.

#include <ATen/ops/cat.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/optim/muon_step.h"
#include "dmuon/plan/state_bytes.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

using at::Tensor;

class ChangedMuonTest : public testing::TestWithParam<std::string> {
 protected:
  MuonGroup group_ = group_of(GetParam(), with_second_moment());

  static std::vector<std::string> all() {
    std::vector<std::string> names = plan::rule_names();
    std::erase(names, "muon");
    return names;
  }

 public:
  static auto values() { return testing::ValuesIn(all()); }
};

INSTANTIATE_TEST_SUITE_P(All, ChangedMuonTest, ChangedMuonTest::values(),
                         [](const auto& rule) { return rule.param; });

TEST_P(ChangedMuonTest, DecaysAloneByAZeroGradient) {
  const Tensor master = random_tensor({1, 3, 4}, 1);
  const Tensor expected = master.mul(1 - 0.05 * 0.1);
  update_with(group_, master, at::zeros({1, 3, 4}), states_for(*group_.rule, master));
  EXPECT_TRUE(master.allclose(expected, 1e-6, 0));
}

TEST_P(ChangedMuonTest, ThatDoesNotApplyChangesNothingWhateverTheGradientHolds) {
  const Tensor master = random_tensor({2, 3, 4}, 1);
  const std::vector<Tensor> states = states_for(*group_.rule, master);
  for (unsigned i = 0; i < states.size(); ++i)
    states[i].copy_(random_tensor(states[i].sizes().vec(), 4 + i).square());
  const Tensor gradient = random_tensor({2, 3, 4}, 3);
  gradient[0][0][0] = NAN;
  gradient[1][2][3] = INFINITY;
  const auto all = [&] {
    std::vector<Tensor> flat{master.flatten()};
    for (const Tensor& state : states) flat.push_back(state.flatten());
    return at::cat(flat);
  };
  const Tensor before = all();
  update_with(group_, master, gradient, states, 1, false, at::logical_not(kApplies));
  EXPECT_TRUE(all().equal(before));
}

// Alone, among others, and in blocks of columns of a wider matrix.
TEST_P(ChangedMuonTest, GivesAMatrixTheSameBitsAloneAndInABatch) {
  for (const auto& [rows, cols] : {std::pair{4, 6}, {40, 70}, {300, 260}}) {
    for (const bool transposed : {false, true}) {
      const auto updated = [&](const Tensor& gradient, std::int64_t blocks) {
        const Tensor master = at::zeros_like(gradient);
        const std::vector<Tensor> states = states_for(*group_.rule, master, blocks, transposed);
        for (int step = 0; step < 2; ++step)
          update_with(group_, master, gradient, states, blocks, transposed);
        return master;
      };
      const Tensor gradient = random_tensor({3, rows, cols}, 1);
      const Tensor together = updated(gradient, 1);
      for (std::int64_t i = 0; i < 3; ++i)
        EXPECT_TRUE(updated(gradient.narrow(0, i, 1), 1).equal(together.narrow(0, i, 1)));
      const auto side_by_side = [&](const Tensor& batch) {
        return batch.transpose(0, 1).reshape({1, rows, 3 * cols});
      };
      EXPECT_TRUE(updated(side_by_side(gradient), 3).equal(side_by_side(together)));
    }
  }
}

TEST_P(ChangedMuonTest, RefusesSlices) {
  const Tensor x = at::zeros({1, 3, 4});
  const Piece slices{x, x, {x, x}, kApplies};
  EXPECT_THROW(group_.rule->direction(slices), core::InvalidArgument);
  EXPECT_THROW(group_.rule->move(slices, x, 3, 4), core::InvalidArgument);
}

TEST_P(ChangedMuonTest, RefusesStatesOfOtherSizes) {
  const Tensor x = at::zeros({1, 3, 4});
  const Tensor wrong = at::zeros({1, 4, 3});
  for (const std::vector<Tensor>& states : {std::vector<Tensor>{x}, {x, wrong}, {x, x, x}})
    EXPECT_THROW(update_with(group_, x, x.clone(), states), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::optim
