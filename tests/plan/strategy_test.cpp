#include "dmuon/plan/strategy.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

TEST(Strategies, AreFoundByEveryNameTheyAreListedUnder) {
  EXPECT_EQ(strategy_names(), (std::vector<std::string>{"load_balance", "round_robin", "rank0"}));
  for (const std::string& name : strategy_names()) EXPECT_NE(find_strategy(name), nullptr);
}

TEST(FindStrategy, NamesTheKnownOnesWhenAskedForAnother) {
  try {
    find_strategy("random");
    FAIL() << "did not throw";
  } catch (const core::InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "find_strategy: strategy must be one of load_balance, round_robin, rank0; got "
                 "'random'");
  }
}

}  // namespace
}  // namespace dmuon::plan
