#include "dmuon/engine/agreement.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "dmuon/core/error.h"
#include "tests/wire/groups.h"

namespace dmuon::engine {
namespace {

using core::ParameterIndex;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kNumParameters = 3;

AgreementInput nothing() {
  AgreementInput input;
  input.has_gradient.resize(kNumParameters);
  input.has_cleared.resize(kNumParameters);
  return input;
}

using HasGradient = core::Vector<ParameterIndex, bool>;

class Agreement : public testing::TestWithParam<int> {
 protected:
  // Calls `body` with a function that agrees on this rank's input.
  void run(const std::function<void(int, std::function<Agreed(const AgreementInput&)>)>& body) {
    wire::run_ranks(GetParam(), [&](int rank, const wire::StorePtr& store) {
      wire::SharedMesh mesh = wire::make_mesh({1, GetParam()}, store, rank);
      body(rank, [&](const AgreementInput& input) { return agree(mesh.words, input); });
    });
  }

  int last() const { return GetParam() - 1; }
};

TEST_P(Agreement, TellsEveryRankOfAGradientThatOneHad) {
  run([](int rank, const auto& agree_on) {
    AgreementInput input = nothing();
    input.has_gradient[ParameterIndex(2)] = rank == 0;
    input.has_cleared[ParameterIndex(1)] = rank == 0;
    const Agreed agreed = agree_on(input);
    EXPECT_EQ(agreed.has_gradient, (HasGradient{false, false, true}));
    EXPECT_EQ(agreed.has_cleared, (HasGradient{false, true, false}));
  });
}

TEST_P(Agreement, TellsEveryRankOfOpenGradientsThatOneHas) {
  run([this](int rank, const auto& agree_on) {
    AgreementInput input = nothing();
    EXPECT_FALSE(agree_on(input).has_open_gradients);
    input.has_open_gradients = rank == last();
    EXPECT_TRUE(agree_on(input).has_open_gradients);
  });
}

TEST_P(Agreement, TakesAlongWordsThatOneRankKnows) {
  run([this](int rank, const auto& agree_on) {
    AgreementInput input = nothing();
    input.words = at::zeros({2}, at::kDouble);
    input.words[rank == last() ? 1 : 0] = rank == last() ? 1e-60 : 0;
    agree_on(input);
    EXPECT_EQ(input.words[0].item<double>(), 0);
    EXPECT_EQ(input.words[1].item<double>(), 1e-60);
  });
}

TEST_P(Agreement, TellsEveryRankTheLargestOfEachWord) {
  run([this](int rank, const auto& agree_on) {
    AgreementInput input = nothing();
    input.words = at::full({4}, -kInfinity, at::kDouble);
    if (rank == last()) input.words[0] = kInfinity;
    input.words[1] = -1. - rank;
    if (rank == 0) input.words[2] = -7;
    agree_on(input);
    EXPECT_TRUE(input.words.equal(at::tensor({kInfinity, -1., -7., -kInfinity}, at::kDouble)));
  });
}

// Any of the hash's 64 bits tells, whichever rank has it.
TEST_P(Agreement, RaisesOnEveryRankWhereOneIssuedSomethingElse) {
  if (GetParam() == 1) return;
  run([this](int rank, const auto& agree_on) {
    for (const int astray : {0, last()}) {
      for (int bit = 0; bit < 64; ++bit) {
        AgreementInput input = nothing();
        input.issued = 0xcbf29ce484222325ULL;
        EXPECT_NO_THROW(agree_on(input));
        if (rank == astray) input.issued ^= std::uint64_t{1} << bit;
        EXPECT_THROW(agree_on(input), core::InvalidArgument);
      }
    }
  });
}

TEST_P(Agreement, RaisesOnEveryRankWhereSettingsDiffer) {
  if (GetParam() == 1) return;
  run([this](int rank, const auto& agree_on) {
    AgreementInput input = nothing();
    for (const std::uint32_t other : {0U, 0xffffffffU, 6U}) {
      input.settings = rank == last() ? other : 7;
      EXPECT_THROW(agree_on(input), SettingsDiffer);
    }
    input.settings = 0xffffffffU;
    EXPECT_NO_THROW(agree_on(input));
  });
}

// The models have three parameters and one, and two maxima and none.
TEST_P(Agreement, RaisesOnEveryRankWhereOneHasAnotherModel) {
  if (GetParam() == 1) return;
  run([this](int rank, const auto& agree_on) {
    for (const int astray : {0, last()}) {
      AgreementInput input = nothing();
      input.words = at::zeros({kNumParameters + 2}, at::kDouble);
      if (rank == astray) {
        input.has_gradient.resize(1);
        input.has_cleared.resize(1);
        input.words = at::zeros({1}, at::kDouble);
        input.most_words = kNumParameters + 2;
        input.model = 2;
        input.most_parameters = kNumParameters;
      }
      try {
        agree_on(input);
        ADD_FAILURE() << "rank " << rank << " went on";
      } catch (const core::InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find("one rank model 1, another model 2"),
                  std::string::npos)
            << error.what();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Agreement, testing::Values(1, 2, 4));

}  // namespace
}  // namespace dmuon::engine
