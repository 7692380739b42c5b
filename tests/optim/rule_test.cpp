#include "dmuon/optim/rules/rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/optim/rules/make_rule.h"
#include "dmuon/optim/rules/muon.h"
#include "dmuon/optim/rules/user_rule.h"
#include "dmuon/plan/state_bytes.h"
#include "tests/newton_schulz/every_backend.h"

namespace dmuon::optim {
namespace {

using at::Tensor;
using newton_schulz::cpu_elementwise;
using newton_schulz::EveryProducts;
using newton_schulz::kDtypes;
using newton_schulz::kFalse;
using newton_schulz::kTrue;
using newton_schulz::PendingProduct;
using newton_schulz::random;
using newton_schulz::tolerance;

class OrthogonalisedTest : public EveryProducts {};

INSTANTIATE_TEST_SUITE_P(All, OrthogonalisedTest, EveryProducts::all(), EveryProducts::name_of);

// [9, 14] of a product with 16 rows and columns; one matrix, a batch and blocks of columns; where
// the backend has them, with factors of the addend's columns or rows.
TEST_P(OrthogonalisedTest, AddsItsLastProductToTheWeights) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t num_blocks : {0, 1, 2}) {
      const Tensor all = random({2, 9, 14 * std::max<std::int64_t>(1, num_blocks)}, at::kFloat);
      const Tensor layout = num_blocks == 0   ? all[0]
                            : num_blocks == 1 ? all
                                              : all.view({2, 9, 2, 14}).transpose(1, 2);
      std::vector<std::int64_t> leading;
      if (num_blocks > 0) leading.push_back(2 * num_blocks);
      const auto operand = [&](std::int64_t rows, std::int64_t cols) {
        auto sizes = leading;
        sizes.insert(sizes.end(), {rows, cols});
        return random(sizes, dtype);
      };
      PendingProduct product{0.5, operand(16, 16), 0.25, operand(16, 32), operand(32, 16)};
      const auto wide = [](const Tensor& x) { return x.to(at::kDouble); };
      std::vector<Tensor> all_factors{Tensor()};
      if (products_.has_wide_squares(dtype)) {
        all_factors.push_back(operand(1, 16).to(at::kFloat));
        all_factors.push_back(operand(16, 1).to(at::kFloat));
      }
      for (const Tensor& factors : all_factors) {
        product.factors = factors;
        const Tensor c = factors.defined() ? wide(product.c).mul(factors) : wide(product.c);
        const Tensor direction = c.mul(product.beta)
                                     .add(wide(product.a).matmul(wide(product.b)), product.alpha)
                                     .narrow(-2, 0, 9)
                                     .narrow(-1, 0, 14)
                                     .reshape(layout.sizes());
        for (const bool applies : {true, false}) {
          const Tensor master = layout.clone();
          const Tensor expected =
              applies ? wide(master).mul(0.9).sub(direction, 0.125) : wide(master);
          const Piece piece{master, {}, {}, applies ? kTrue : kFalse};
          Orthogonalised{&products_, &cpu_elementwise(), product}.add_to_weights(piece, 0.9,
                                                                                 -0.125);
          const double off = wide(master).sub(expected).norm().item().toDouble();
          const double allowed =
              0.125 * tolerance(dtype) * direction.norm().item().toDouble() + tolerance(at::kFloat);
          EXPECT_LE(off, applies ? allowed : 0) << dtype << " " << num_blocks;
        }
      }
    }
  }
}

// A rule that changes the update gets it without its padding.
TEST_P(OrthogonalisedTest, ComputesItsUpdate) {
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor c = random({4, 16, 16}, dtype);
    const Tensor a = random({4, 16, 8}, dtype);
    const Tensor b = random({4, 8, 16}, dtype);
    const Tensor exact = c.to(at::kDouble)
                             .mul(0.5)
                             .add(a.to(at::kDouble).matmul(b.to(at::kDouble)), 0.25)
                             .narrow(1, 0, 9)
                             .narrow(2, 0, 14);
    const Orthogonalised update{&products_, &cpu_elementwise(), {0.5, c, 0.25, a, b}};
    newton_schulz::expect_near(update.computed({4, 9, 14}), exact, toString(dtype));
    EXPECT_EQ(update.computed({2, 2, 9, 14}).sizes(), (at::IntArrayRef{2, 2, 9, 14}));
  }
}

// One value a row, as NorMuon keeps.
constexpr std::array<std::int64_t, 2> one_a_row(std::int64_t rows, std::int64_t, bool) {
  return {rows, 1};
}

using Sizes = std::vector<std::int64_t>;

constexpr std::array<std::int64_t, 2> one_a_neuron(std::int64_t rows, std::int64_t cols,
                                                   bool transposed) {
  return transposed ? std::array{std::int64_t{1}, cols} : one_a_row(rows, cols, transposed);
}

TEST(State, HasSizesThatFollowFromHowTheMatrixIsStored) {
  const State neuron{"second_momentum", one_a_neuron};
  EXPECT_EQ(neuron.sizes_of({7, 3, 8, 2, false}), (Sizes{3, 2}));
  EXPECT_EQ(neuron.sizes_of({7, 3, 8, 2, true}), (Sizes{1, 8}));
}

TEST(State, HasSizesThatFollowFromTheMatrix) {
  const State row{"second_momentum", one_a_row};
  EXPECT_EQ(row.sizes_of({7, 3, 8}), (Sizes{3, 1}));
  EXPECT_EQ(row.sizes_of({7, 3, 8, 2}), (Sizes{3, 2}));
}

TEST(Muon, KeepsAMomentumOfTheMatrixsSizes) {
  const std::vector<State> states = Muon({0.1, 0, 0.9, true, AdjustLr::kOriginal}).states();
  ASSERT_EQ(states.size(), 1);
  EXPECT_EQ(states[0].name, "momentum_buffer");
  EXPECT_EQ(states[0].sizes_of({7, 3, 8}), (Sizes{3, 8}));
  EXPECT_EQ(states[0].sizes_of({7, 3, 8, 2}), (Sizes{3, 8}));
}

// A plan knows no tensor, so it has the bytes by itself.
void expect_bytes_of_a_plan(const Rule& rule, const std::string& name) {
  for (const layout::View& view :
       {layout::View{1, 6, 10}, {4, 6, 10}, {3, 6, 10, 2}, {2, 6, 10, 5, true}}) {
    std::int64_t values = 2 * view.num_elements();  // master and gradient
    for (const State& state : rule.states()) {
      const Sizes sizes = state.sizes_of(view);
      values += view.num_matrices * sizes[0] * sizes[1];
    }
    const layout::Parameter parameter{"weight", view};
    EXPECT_EQ(plan::state_bytes(parameter.shape(), name), 4 * values) << name;
  }
}

TEST(MakeRule, KnowsThePlansRulesWhoseBytesItsStatesHave) {
  for (const std::string& name : plan::rule_names())
    expect_bytes_of_a_plan(*make_rule(name, {}), name);
}

TEST(UserRule, HasTheBytesThatAPlanReadsFromItsName) {
  UserFunction function{"mine", {}, false, {}};
  function.states = {user_state("a", 1, 1), user_state("b", std::nullopt, 2),
                     user_state("c", 3, std::nullopt), user_state("d", std::nullopt, std::nullopt)};
  expect_bytes_of_a_plan(UserRule({}, std::make_shared<UserFunction>(function)),
                         "mine[1 x 1, rows x 2, 3 x cols, rows x cols]");
}

TEST(MakeRule, RefusesAnotherNameThanThePlansWithTheseNames) {
  try {
    make_rule("another", {});
    FAIL() << "accepted";
  } catch (const core::InvalidArgument& error) {
    const std::string names = core::joined(plan::rule_names());  // as plans know them, and no more
    EXPECT_STREQ(error.what(),
                 ("Muon: rule: expected one of " + names + "; got 'another'").c_str());
  }
}

}  // namespace
}  // namespace dmuon::optim
