#include "dmuon/plan/strategy.h"

#include <gtest/gtest.h>

#include "tests/plan/message_of.h"

namespace dmuon::plan {
namespace {

TEST(Strategies, AreFoundByEveryNameTheyAreListedUnder) {
  EXPECT_EQ(strategy_names(), (std::vector<std::string>{"load_balance", "lpt", "round_robin",
                                                        "rank0", "xor_layout"}));
  for (const std::string& name : strategy_names()) EXPECT_NE(find_strategy(name), nullptr);
}

TEST(FindStrategy, NamesTheKnownOnesWhenAskedForAnother) {
  EXPECT_EQ(message_of([] { find_strategy("random"); }),
            "find_strategy: strategy must be one of load_balance, lpt, round_robin, rank0, "
            "xor_layout; got 'random'");
}

}  // namespace
}  // namespace dmuon::plan
