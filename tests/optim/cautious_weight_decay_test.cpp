#include <ATen/ops/logical_not.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "dmuon/plan/state_bytes.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

MuonOptions decaying(double weight_decay, bool cautious) {
  MuonOptions options = with_second_moment();
  options.weight_decay = weight_decay;
  options.cautious_weight_decay = cautious;
  return options;
}

at::Tensor decayed(const std::string& rule, const MuonOptions& options, const at::Tensor& from,
                   std::int64_t column_blocks = 1, bool transposed = false,
                   const at::Tensor& applies = kApplies) {
  at::Tensor master = from.clone();
  const MuonGroup group = group_of(rule, options);
  update_with(group, master, random_tensor(from.sizes().vec(), 2),
              states_for(*group.rule, from, column_blocks, transposed), column_blocks, transposed,
              applies);
  return master;
}

// The update without decay says which elements decay: those whose weight has its sign.
TEST(CautiousWeightDecay, DecaysElementsWhoseUpdateHasTheWeightsSignByAnyRule) {
  for (const std::string& rule : plan::rule_names()) {
    for (const auto& [rows, cols, blocks, transposed] :
         {std::tuple{6, 10, 1, false}, {6, 10, 2, true}, {300, 280, 1, false}}) {
      const at::Tensor master = random_tensor({2, rows, cols}, 1);
      const at::Tensor moved = decayed(rule, decaying(0, false), master, blocks, transposed);
      // No update depends on the weights. Those of zeros are not rounded as weights are.
      const at::Tensor update =
          decayed(rule, decaying(0, false), at::zeros_like(master), blocks, transposed).neg();
      const at::Tensor decays = update.mul(master).ge(0);
      const at::Tensor expected = moved.sub(master.mul(0.05 * 0.4).mul(decays));
      const at::Tensor got = decayed(rule, decaying(0.4, true), master, blocks, transposed);
      EXPECT_LE(got.sub(expected).abs().max().item<float>(), 1e-6) << rule;
      const auto share = decays.to(at::kFloat).mean().item<float>();
      EXPECT_TRUE(0.2 < share && share < 0.8) << share;
    }
  }
}

TEST(CautiousWeightDecay, OfAZeroUpdateDecaysAll) {
  at::Tensor master = random_tensor({1, 3, 4}, 1);
  const at::Tensor expected = master.mul(1 - 0.05 * 0.4);
  const at::Tensor nothing = at::zeros({1, 3, 4});
  muon_update(master, nothing.clone(), nothing, group_of(decaying(0.4, true)), kApplies);
  EXPECT_TRUE(master.allclose(expected, 1e-6, 0));
}

TEST(CautiousWeightDecay, ThatDoesNotApplyChangesNoWeight) {
  const at::Tensor master = random_tensor({2, 6, 10}, 1);
  for (const std::string& rule : plan::rule_names()) {
    const at::Tensor same =
        decayed(rule, decaying(0.4, true), master, 1, false, at::logical_not(kApplies));
    EXPECT_TRUE(same.equal(master));
  }
}

// With tensor parallelism Muon moves slices.
TEST(CautiousWeightDecay, OfSlicesIsThatOfWholeMatrices) {
  const Muon rule(decaying(0.4, true));
  const at::Tensor whole = random_tensor({6, 10}, 1);
  const at::Tensor update = random_tensor({6, 10}, 2);
  const at::Tensor expected =
      whole.sub(whole.mul(0.05 * 0.4).mul(update.mul(whole).ge(0))).sub(update.mul(0.05));
  const at::Tensor slice = whole.narrow(1, 3, 4).contiguous();
  rule.move({slice, {}, {}, kApplies}, update.narrow(1, 3, 4), 6, 10);
  EXPECT_LE(slice.sub(expected.narrow(1, 3, 4)).abs().max().item<float>(), 1e-6);
}

TEST(CautiousWeightDecay, IsNotForGraphs) {
  EXPECT_TRUE(Muon(decaying(0.4, false)).constants().has_value());
  EXPECT_FALSE(Muon(decaying(0.4, true)).constants().has_value());
}

}  // namespace
}  // namespace dmuon::optim
