#include "dmuon/engine/agreement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "dmuon/core/error.h"
#include "tests/engine/rank_threads.h"

namespace dmuon::engine {
namespace {

using core::ParameterIndex;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kNumParameters = 3;

AgreementInput nothing() {
  AgreementInput input;
  input.has_gradient.resize(kNumParameters);
  input.squared_norms.resize(kNumParameters);
  return input;
}

class Agreement : public testing::TestWithParam<int> {
 protected:
  // Calls `body` with a function that agrees on this rank's input.
  void run(const std::function<void(int, std::function<Verdict(const AgreementInput&)>)>& body) {
    run_ranks(GetParam(), [&](int rank, const StorePtr& store) {
      Group group = make_group(store, "verdict", rank, GetParam());
      body(rank, [&](const AgreementInput& input) { return agree(group, input); });
    });
  }

  int last() const { return GetParam() - 1; }
};

// A gradient may have come on one rank alone; only its owner knows a norm.
TEST_P(Agreement, TellsEveryRankWhatAnyRankKnows) {
  run([this](int rank, const auto& agree_on) {
    AgreementInput input = nothing();
    input.has_gradient[ParameterIndex(2)] = rank == 0;
    if (rank == last()) input.squared_norms[ParameterIndex(2)] = 1e-60;
    const Verdict verdict = agree_on(input);
    EXPECT_TRUE(verdict.finite);
    EXPECT_EQ(verdict.has_gradient, (core::Vector<ParameterIndex, bool>{false, false, true}));
    EXPECT_EQ(verdict.squared_norms, (core::Vector<ParameterIndex, double>{0.0, 0.0, 1e-60}));
  });
}

TEST_P(Agreement, StopsEveryRankAtOneRanksNanOrInfinity) {
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    run([&](int rank, const auto& agree_on) {
      AgreementInput owned = nothing();
      owned.squared_norms[ParameterIndex(1)] = rank == last() ? bad : 0;
      const Verdict verdict = agree_on(owned);
      EXPECT_FALSE(verdict.finite);
      for (const double squared : verdict.squared_norms) EXPECT_TRUE(std::isfinite(squared));
      // The host's gradients count too, a sharded and a replicated one.
      AgreementInput host = nothing();
      host.host.sharded = rank == last() ? bad : 0;
      EXPECT_FALSE(agree_on(host).finite);
      host.host = {0, rank == 0 ? bad : 0};
      EXPECT_FALSE(agree_on(host).finite);
      EXPECT_TRUE(agree_on(nothing()).finite);
    });
  }
}

// Replicas hold the same shards; what every rank holds alike counts once.
TEST_P(Agreement, CountsEachOfTheHostsGradientsOnce) {
  for (int num_shards = 1; num_shards <= GetParam(); ++num_shards) {
    if (GetParam() % num_shards != 0) continue;
    run([&](int rank, const auto& agree_on) {
      AgreementInput input = nothing();
      input.num_host_shards = num_shards;
      input.host = {std::pow(10, rank % num_shards), 5e-9};
      const double expected = (std::pow(10, num_shards) - 1) / 9 + 5e-9;
      EXPECT_DOUBLE_EQ(agree_on(input).host_squared_norm, expected);
    });
  }
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
      EXPECT_THROW(agree_on(input), core::InvalidArgument);
    }
    input.settings = 0xffffffffU;
    EXPECT_NO_THROW(agree_on(input));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Agreement, testing::Values(1, 2, 4));

TEST(Verdict, ScalesNormsWithTheirGradients) {
  Verdict verdict;
  verdict.squared_norms = {4.0, 1.0};
  verdict.host_squared_norm = 16;
  verdict.scale(0.5);
  EXPECT_EQ(verdict.squared_norms, (core::Vector<ParameterIndex, double>{1.0, 0.25}));
  EXPECT_EQ(verdict.host_squared_norm, 4);
}

}  // namespace
}  // namespace dmuon::engine
