#include <ATen/ops/cat.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "dmuon/plan/state_bytes.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

constexpr int kSteps = 3;

// Weights and a rule's states, the first of which is the momentum.
struct Trained {
  std::vector<at::Tensor> tensors;
};

MuonGroup group_of_rule(const std::string& rule, bool cautious) {
  MuonOptions options = with_second_moment();
  options.cautious_weight_decay = cautious;
  options.adjust_lr = AdjustLr::kSpectralUnclamped;
  return group_of(rule, options);
}

Trained zeros_of(const MuonGroup& group, const at::Tensor& master,
                 const std::vector<std::int64_t>& heights) {
  Trained trained{{master.clone()}};
  for (const State& state : group.rule->states()) {
    std::vector<std::int64_t> sizes =
        state.sizes_of({.rows = master.size(1), .cols = master.size(2), .heights = heights});
    sizes.insert(sizes.begin(), master.size(0));
    trained.tensors.push_back(at::zeros(sizes));
  }
  return trained;
}

void step(const MuonGroup& group, Trained& trained, const at::Tensor& gradient,
          const std::vector<std::int64_t>& heights, const at::Tensor& applies = kApplies) {
  std::vector<at::Tensor>& all = trained.tensors;
  muon_update(all[0], all[1], gradient, group, applies, 1, false, {}, {all.begin() + 2, all.end()},
              heights);
}

// Rows of one part of every group, one group after the other, by index. [b, rows, n] -> [b, m, n]
at::Tensor rows_of_part(const at::Tensor& stored, const std::vector<std::int64_t>& heights,
                        std::size_t part) {
  std::int64_t group = 0;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < heights.size(); ++i) {
    if (i == part) first = group;
    group += heights[i];
  }
  std::vector<at::Tensor> rows;
  for (std::int64_t begin = first; begin < stored.size(1); begin += group)
    rows.push_back(stored.narrow(1, begin, heights[part]));
  return at::cat(rows, 1);
}

struct Case {
  std::int64_t count;
  std::int64_t groups;
  std::vector<std::int64_t> heights;
  std::int64_t cols;
};

// Q, K and V of GPT-NeoX; unequal parts in one group; a height of 1; matrices that go one by one.
const Case kCases[] = {
    {2, 4, {3, 3, 3}, 10}, {5, 1, {6, 4}, 12}, {1, 5, {1, 2}, 8}, {1, 2, {150, 140}, 310}};

// Each part has the update, to the bit, that it has as a matrix of its own.
TEST(Interleaved, PartsAreUpdatedAsMatricesOfTheirOwnByAnyRule) {
  for (const std::string& rule : plan::rule_names()) {
    for (const bool cautious : {false, true}) {
      for (const auto& [count, groups, heights, cols] : kCases) {
        const MuonGroup group = group_of_rule(rule, cautious);
        std::int64_t rows = 0;
        for (const std::int64_t height : heights) rows += groups * height;
        const at::Tensor master = random_tensor({count, rows, cols}, 1);
        Trained together = zeros_of(group, master, heights);
        std::vector<Trained> alone;
        for (std::size_t part = 0; part < heights.size(); ++part)
          alone.push_back(zeros_of(group, rows_of_part(master, heights, part), {}));
        for (unsigned i = 0; i < kSteps; ++i) {
          const at::Tensor gradient = random_tensor({count, rows, cols}, 2 + i);
          step(group, together, gradient, heights);
          for (std::size_t part = 0; part < heights.size(); ++part)
            step(group, alone[part], rows_of_part(gradient, heights, part), {});
        }
        for (std::size_t part = 0; part < heights.size(); ++part) {
          for (std::size_t i = 0; i < together.tensors.size(); ++i) {
            const at::Tensor found = rows_of_part(together.tensors[i], heights, part);
            EXPECT_TRUE(found.equal(alone[part].tensors[i])) << rule << " tensor " << i;
          }
        }
      }
    }
  }
}

// Against the formulas in fp64, which know nothing of batches.
TEST(Interleaved, PartsFollowMuonsFormulas) {
  const std::vector<std::int64_t> heights{4, 2};
  const MuonOptions options = muon(0.05);
  const at::Tensor stored = random_tensor({1, 18, 7}, 1);
  const at::Tensor gradient = random_tensor({1, 18, 7}, 2);
  Trained trained = zeros_of(group_of(options), stored, heights);
  step(group_of(options), trained, gradient, heights);
  for (const std::size_t part : {std::size_t{0}, std::size_t{1}}) {
    const auto of = [&](const at::Tensor& all) {
      return plain_of(rows_of_part(all, heights, part)[0]);
    };
    Plain master = of(stored);
    Plain momentum = of(at::zeros({1, 18, 7}));
    plain_muon_update(&master, &momentum, of(gradient),
                      plain_options(options, 3 * heights[part], 7));
    EXPECT_LE(largest_difference(rows_of_part(trained.tensors[0], heights, part)[0], master), 2e-5);
  }
}

// In three calls, as accelerators make them, and in one.
TEST(Interleaved, AreTheSameInThreeCalls) {
  const c10::AutoGradMode no_grad(false);
  const layout::View view{.num_matrices = 3, .rows = 20, .cols = 9, .heights = {3, 2}};
  const at::Tensor gradient = random_tensor({3, 20, 9}, 2);
  for (const std::string& rule : plan::rule_names()) {
    const MuonGroup group = group_of_rule(rule, false);
    const auto updated = [&](bool runs) {
      Trained trained = zeros_of(group, random_tensor({3, 20, 9}, 1), view.heights);
      const std::vector<at::Tensor>& all = trained.tensors;
      for (std::size_t part = 0; part < 2; ++part) {
        BatchUpdate update(group, part_of({.weights = all[0],
                                           .gradient = gradient,
                                           .states = {all.begin() + 1, all.end()},
                                           .applies = kApplies},
                                          view, part));
        if (runs) {
          update.run();
          continue;
        }
        update.prepare();
        update.orthogonalise();
        update.apply();
      }
      return all;
    };
    const std::vector<at::Tensor> expected = updated(true);
    const std::vector<at::Tensor> found = updated(false);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i]));
  }
}

TEST(Interleaved, StayAsTheyAreIfTheStepDoesNotApply) {
  const at::Tensor stored = random_tensor({2, 12, 7}, 1);
  for (const std::string& rule : plan::rule_names()) {
    const MuonGroup group = group_of_rule(rule, true);
    Trained trained = zeros_of(group, stored, {2, 1});
    step(group, trained, random_tensor({2, 12, 7}, 2), {2, 1});
    std::vector<at::Tensor> before;
    for (const at::Tensor& tensor : trained.tensors) before.push_back(tensor.clone());
    step(group, trained, random_tensor({2, 12, 7}, 3), {2, 1}, kApplies.logical_not());
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(trained.tensors[i].equal(before[i])) << rule << " tensor " << i;
  }
}

// Kernels want the memos of the matrices that they update together without gaps.
TEST(Interleaved, PartsHaveMemosOfTheirOwnWithoutGaps) {
  const layout::View view{.num_matrices = 4, .rows = 6, .cols = 5, .heights = {2, 1}};
  const at::Tensor stored = at::zeros({4, 6, 5});
  const at::Tensor memo = at::zeros({4, 1, 2 * 3});
  for (const std::size_t part : {std::size_t{0}, std::size_t{1}}) {
    const Piece piece = part_of({.weights = stored,
                                 .gradient = stored,
                                 .states = {stored},
                                 .applies = kApplies,
                                 .memo = memo},
                                view, part);
    EXPECT_EQ(piece.memo.sizes(), (at::IntArrayRef{4, 1, 3}));
    EXPECT_TRUE(piece.memo.is_contiguous());
    at::Tensor(piece.memo).add_(1 + static_cast<int>(part));
  }
  EXPECT_EQ(memo.sum().item<float>(), 12 + 24);
}

TEST(Interleaved, HeightsThatDoNotFitAreRefused) {
  const MuonGroup group = group_of(muon(0.05));
  const at::Tensor x = at::zeros({1, 12, 4});
  for (const std::vector<std::int64_t>& heights :
       {std::vector<std::int64_t>{12}, {5, 5}, {12, 0}, {16, -4}, {8, 16}}) {
    EXPECT_THROW(muon_update(x, x, x, group, kApplies, 1, false, {}, {}, heights),
                 core::InvalidArgument);
  }
  EXPECT_THROW(muon_update(x, x, x, group, kApplies, 2, false, {}, {}, {2, 1}),
               core::InvalidArgument);
  EXPECT_THROW(muon_update(x, x, x, group, kApplies, 1, true, {}, {}, {2, 1}),
               core::InvalidArgument);
  EXPECT_THROW(muon_update(x[0], x[0], x[0], group, kApplies, 1, false, {}, {}, {2, 1}),
               core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::optim
