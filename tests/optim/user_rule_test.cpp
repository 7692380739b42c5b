#include "dmuon/optim/rules/user_rule.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

using at::Tensor;
using Call = std::function<UserResult(const UserMatrix&)>;

MuonGroup user_group(Call call, bool moves_weights = false,
                     const MuonOptions& options = muon(0.05)) {
  UserFunction function{"mine", {}, moves_weights, std::move(call)};
  function.states.push_back(user_state("sums", std::nullopt, 1));
  MuonGroup group = group_of(options);
  group.rule =
      std::make_shared<UserRule>(options, std::make_shared<UserFunction>(std::move(function)));
  return group;
}

// Rows sum up what columns do not.
UserResult scaled_by_rows(const UserMatrix& matrix) {
  const Tensor sums = matrix.states[0].add(matrix.update.square().sum(1, /*keepdim=*/true));
  return {matrix.update.div(sums.sqrt().add(0.1)), {sums}};
}

struct Updated {
  Tensor master;
  Tensor sums;
};

Updated updated(const MuonGroup& group, const Tensor& from, std::int64_t blocks = 1,
                bool transposed = false, const Tensor& applies = kApplies) {
  Updated of{from.clone(), transposed ? at::zeros({from.size(0), 1, from.size(2)})
                                      : at::zeros({from.size(0), from.size(1), blocks})};
  const Tensor momentum = at::zeros_like(from);
  for (unsigned step = 0; step < 2; ++step) {
    const Tensor gradient = random_tensor(from.sizes().vec(), 10 + step);
    muon_update(of.master, momentum, gradient, group, applies, blocks, transposed, {}, {of.sums});
  }
  return of;
}

// Muon's own update of the same gradients, by which the expected one is computed.
TEST(UserRule, AppliesTheUpdateThatItsFunctionReturns) {
  for (const bool transposed : {false, true}) {
    const Tensor master = random_tensor({2, 5, 8}, 1);
    const MuonOptions options = muon(0.05);
    std::vector<Tensor> directions;
    const MuonGroup group = user_group([&](const UserMatrix& matrix) {
      directions.push_back(matrix.update.clone());
      return scaled_by_rows(matrix);
    });
    const Updated got = updated(group, master, 1, transposed);
    ASSERT_EQ(directions.size(), 4);  // of two steps
    for (std::int64_t i = 0; i < 2; ++i) {
      const auto upright = [&](const Tensor& x) { return transposed ? x[i].mT() : x[i]; };
      Tensor weights = upright(master);
      Tensor sums = at::zeros({weights.size(0), 1});
      const double rate =
          adjusted(options.adjust_lr, options.lr, static_cast<double>(weights.size(0)),
                   static_cast<double>(weights.size(1)));
      for (const std::int64_t step : {0, 1}) {
        const Tensor& direction = directions.at(static_cast<std::size_t>(2 * step + i));
        ASSERT_EQ(direction.sizes(), weights.sizes());
        sums = sums.add(direction.square().sum(1, true));
        weights = weights.mul(1 - options.lr * options.weight_decay)
                      .sub(direction.div(sums.sqrt().add(0.1)).mul(rate));
      }
      EXPECT_TRUE(upright(got.master).allclose(weights, 1e-5, 1e-6));
      EXPECT_TRUE(upright(got.sums).allclose(sums, 1e-5, 1e-6));
    }
  }
}

TEST(UserRule, GivesItsFunctionMuonsUpdateAndTheGroupsNumbers) {
  MuonOptions options = muon(0.05);
  options.beta2 = 0.7;
  options.adjust_lr = AdjustLr::kMatchRmsAdamw;
  const Tensor master = random_tensor({1, 6, 4}, 1);
  Tensor seen;
  const MuonGroup group = user_group(
      [&](const UserMatrix& matrix) {
        EXPECT_DOUBLE_EQ(matrix.lr, 0.05);
        EXPECT_DOUBLE_EQ(matrix.adjusted_lr, 0.2 * 0.05 * std::sqrt(6.0));
        EXPECT_DOUBLE_EQ(matrix.weight_decay, 0.1);
        EXPECT_DOUBLE_EQ(matrix.beta2, 0.7);
        EXPECT_TRUE(matrix.weights.equal(master[0]));
        seen = matrix.update;
        return UserResult{matrix.update, matrix.states};
      },
      false, options);
  const Tensor gradient = random_tensor({1, 6, 4}, 2);
  const Tensor of_user = master.clone();
  muon_update(of_user, at::zeros_like(master), gradient, group, kApplies, 1, false, {},
              {at::zeros({1, 6, 1})});
  const Tensor of_muon = master.clone();
  muon_update(of_muon, at::zeros_like(master), gradient, group_of(options), kApplies);
  EXPECT_TRUE(of_user.allclose(of_muon, 1e-6, 1e-6));
  EXPECT_EQ(seen.scalar_type(), at::kFloat);
}

TEST(UserRule, ThatMovesTheWeightsTakesThemAsTheyCome) {
  const Tensor master = random_tensor({2, 5, 8}, 1);
  const MuonGroup group = user_group(
      [](const UserMatrix& matrix) {
        matrix.weights.mul_(2);  // of a copy
        return UserResult{matrix.weights, {matrix.states[0].add_(1)}};
      },
      true);
  for (const bool transposed : {false, true}) {
    const Updated got = updated(group, master, 2, transposed);
    EXPECT_TRUE(got.master.equal(master.mul(4)));
    EXPECT_TRUE(got.sums.eq(2).all().item<bool>());
  }
}

TEST(UserRule, ThatDoesNotApplyChangesNothing) {
  const Tensor master = random_tensor({2, 5, 8}, 1);
  for (const bool moves : {false, true}) {
    const MuonGroup group = user_group(
        [](const UserMatrix& matrix) {
          return UserResult{matrix.update.fill_(NAN), {matrix.states[0].fill_(NAN)}};
        },
        moves);
    const Updated got = updated(group, master, 1, false, at::logical_not(kApplies));
    EXPECT_TRUE(got.master.equal(master));
    EXPECT_TRUE(got.sums.eq(0).all().item<bool>());
  }
}

// Alone, among others, and in blocks of columns of a wider matrix.
TEST(UserRule, GivesAMatrixTheSameBitsAloneAndInABatch) {
  for (const auto& [rows, cols] : {std::pair{4, 6}, {300, 260}}) {
    for (const bool transposed : {false, true}) {
      const auto run = [&](const Tensor& gradient, std::int64_t blocks) {
        const Tensor master = at::zeros_like(gradient);
        const Tensor sums = transposed ? at::zeros({gradient.size(0), 1, gradient.size(2)})
                                       : at::zeros({gradient.size(0), gradient.size(1), blocks});
        const Tensor momentum = at::zeros_like(gradient);
        for (int step = 0; step < 2; ++step)
          muon_update(master, momentum, gradient, user_group(scaled_by_rows), kApplies, blocks,
                      transposed, {}, {sums});
        return master;
      };
      const Tensor gradient = random_tensor({3, rows, cols}, 1);
      const Tensor together = run(gradient, 1);
      for (std::int64_t i = 0; i < 3; ++i)
        EXPECT_TRUE(run(gradient.narrow(0, i, 1), 1).equal(together.narrow(0, i, 1)));
      const auto side_by_side = [&](const Tensor& batch) {
        return batch.transpose(0, 1).reshape({1, batch.size(1), 3 * cols});
      };
      EXPECT_TRUE(run(side_by_side(gradient), 3).equal(side_by_side(together)));
    }
  }
}

void expect_refused(const Call& call, const std::string& words) {
  try {
    updated(user_group(call), random_tensor({1, 3, 4}, 1));
    FAIL() << "accepted: " << words;
  } catch (const core::InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("Muon.step: rule 'mine': "), std::string::npos) << text;
    EXPECT_NE(text.find(words), std::string::npos) << text;
  }
}

TEST(UserRule, RefusesAWrongAnswerByName) {
  const auto answer = [](const auto& change) {
    return [change](const UserMatrix& matrix) {
      return UserResult{change(matrix.update), matrix.states};
    };
  };
  expect_refused(answer([](const Tensor& x) { return x.narrow(1, 1, 3); }),
                 "changed update: expected Float [3, 4] on cpu, got Float [3, 3] on cpu");
  expect_refused(answer([](const Tensor& x) { return x.to(at::kHalf); }), "got Half [3, 4] on cpu");
  expect_refused(answer([](const Tensor& x) { return x.to(at::kMeta); }), "on meta");
  expect_refused(answer([](const Tensor& /*x*/) { return Tensor(); }), "expected a tensor");
  expect_refused([](const UserMatrix& /*matrix*/) -> UserResult { throw std::runtime_error("no"); },
                 "rule 'mine': no");
  expect_refused(
      [](const UserMatrix& matrix) {
        return UserResult{matrix.update, {at::zeros({1, 3})}};
      },
      "state 'sums': expected Float [3, 1] on cpu, got Float [1, 3] on cpu");
}

TEST(UserRule, RefusesCautiousWeightDecayIfItMovesTheWeights) {
  MuonOptions options = muon(0.05);
  options.cautious_weight_decay = true;
  EXPECT_NO_THROW(user_group(scaled_by_rows, false, options));
  EXPECT_THROW(user_group(scaled_by_rows, true, options), core::InvalidArgument);
}

TEST(UserState, HasSizesOfAnOutByInMatrixHoweverItIsStored) {
  using Sizes = std::vector<std::int64_t>;
  const State rows = user_state("rows", std::nullopt, 2);
  EXPECT_EQ(rows.sizes_of({7, 3, 8, 2, false}), (Sizes{3, 4}));
  EXPECT_EQ(rows.sizes_of({7, 3, 8, 2, true}), (Sizes{2, 8}));
  const State all = user_state("all", std::nullopt, std::nullopt);
  EXPECT_EQ(all.sizes_of({7, 3, 8, 2, true}), (Sizes{3, 8}));
  EXPECT_EQ(user_state("one", 1, 1).sizes_of({7, 3, 8, 2, true}), (Sizes{1, 2}));
}

}  // namespace
}  // namespace dmuon::optim
