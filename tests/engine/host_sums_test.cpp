#include "dmuon/engine/host_sums.h"

#include <gtest/gtest.h>

#include <vector>

namespace dmuon::engine {
namespace {

void backward(HostSums* sums, const std::vector<int>& units, bool syncs, bool cleared = false) {
  sums->begin_backward(cleared);
  for (const int unit : units) sums->use(core::UnitIndex(unit));
  sums->end_backward(syncs);
}

TEST(HostSums, AreHeldFromAMicroStepUntilASynchronisedBackward) {
  HostSums sums(/*replicated=*/true);
  backward(&sums, {0, 1}, /*syncs=*/false);
  EXPECT_TRUE(sums.held());
  backward(&sums, {}, /*syncs=*/true);  // of a model part without host units
  EXPECT_TRUE(sums.held());
  backward(&sums, {1, 0}, /*syncs=*/true);
  EXPECT_FALSE(sums.held());
  EXPECT_FALSE(sums.take_mixed());
}

TEST(HostSums, AreMixedByOtherUnitsAndSayItOnce) {
  HostSums sums(/*replicated=*/true);
  backward(&sums, {0}, /*syncs=*/false);
  backward(&sums, {0, 1}, /*syncs=*/true);
  EXPECT_TRUE(sums.take_mixed());
  EXPECT_FALSE(sums.take_mixed());
}

TEST(HostSums, AreMixedWhereOtherGradientsWereCleared) {
  HostSums sums(/*replicated=*/true);
  backward(&sums, {0}, /*syncs=*/false);
  sums.clear_leaf();
  EXPECT_TRUE(sums.take_mixed());
  backward(&sums, {0}, /*syncs=*/false);
  backward(&sums, {0}, /*syncs=*/true, /*cleared=*/true);
  EXPECT_TRUE(sums.take_mixed());
  sums.clear_leaf();  // nothing is held any more
  EXPECT_FALSE(sums.take_mixed());
}

TEST(HostSums, AreForgottenWithTheGradients) {
  HostSums sums(/*replicated=*/true);
  backward(&sums, {0}, /*syncs=*/false);
  sums.clear_leaf();
  sums.forget();
  EXPECT_FALSE(sums.held());
  EXPECT_FALSE(sums.take_mixed());
}

TEST(HostSums, AreNeverHeldOnOneNode) {
  HostSums sums(/*replicated=*/false);
  backward(&sums, {0}, /*syncs=*/false);
  EXPECT_FALSE(sums.held());
  backward(&sums, {1}, /*syncs=*/true);
  EXPECT_FALSE(sums.take_mixed());
}

}  // namespace
}  // namespace dmuon::engine
