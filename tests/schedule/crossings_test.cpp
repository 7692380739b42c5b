#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/schedule/recorder.h"

namespace dmuon::schedule {
namespace {

/// Writes down the crossings of a backward too.
class CrossingRecorder : public Recorder {
 public:
  void before_crossing(int num_crossed) override { add(core::message("crossed ", num_crossed)); }
};

class CrossingsTest : public ResolverTest {
 protected:
  /// Returns what a rank issues in its third step, whose backward uses these units.
  static std::string third_step(const std::vector<UnitIndex>& units, bool sync = true) {
    CrossingRecorder recorder;
    Resolver resolver(three_units(2, 2), {}, batches_of({{0}, {1}, {2}}), &recorder);
    for (int step = 0; step < 2; ++step) {
      forward(&resolver, {kA, kB, kC});
      backward(&resolver, {kC, kB, kA});
      resolver.settle_step();
      resolver.step();
    }
    forward(&resolver, {kA, kB, kC});
    recorder.take();
    resolver.set_sync(sync);
    if (!units.empty()) backward(&resolver, units);
    resolver.settle_step();
    resolver.set_sync(true);
    return recorder.take();
  }
};

// So a performer may issue messages of its own before a crossing.
TEST_F(CrossingsTest, ComeBetweenTheSameOperationsOnARankThatSkipsUnits) {
  const std::string all = third_step({kC, kB, kA});
  std::size_t place = 0;
  for (int crossed = 0; crossed < 6; ++crossed) {  // of three units, a use and an end each
    const std::size_t next = all.find(core::message("crossed ", crossed), place);
    ASSERT_NE(next, std::string::npos) << crossed << ": " << all;
    place = next;
  }
  EXPECT_EQ(all.find("crossed 6"), std::string::npos);
  EXPECT_EQ(third_step({kC, kA}), all);
  EXPECT_EQ(third_step({kA}), all);
  EXPECT_EQ(third_step({}), all);
}

TEST_F(CrossingsTest, AreNoneUnderNoSync) {
  EXPECT_EQ(third_step({kC, kB, kA}, /*sync=*/false).find("crossed"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::schedule
