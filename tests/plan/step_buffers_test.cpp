#include "dmuon/plan/step_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace dmuon::plan {
namespace {

using Kind = BufferEvent::Kind;
constexpr core::UnitIndex kFirst(0);
constexpr core::UnitIndex kSecond(1);

// Of units of this size, with equal parts of all ranks.
schedule::Layout equal_units(int num_units, int num_replicates, int num_shards) {
  schedule::UnitLayout unit;
  for (int slot = 0; slot < num_replicates * num_shards; ++slot) unit.owner_elements.push_back(5);
  return {{num_replicates, num_shards},
          core::Vector<core::UnitIndex, schedule::UnitLayout>(static_cast<std::size_t>(num_units),
                                                              unit)};
}

BufferPeaks peaks(const std::vector<BufferEvent>& events, const BufferBytes& bytes,
                  bool keeps = false) {
  return buffer_peaks(events, bytes, keeps);
}

TEST(BufferPeaks, CountWhatIsTakenUntilItIsGivenBack) {
  const BufferBytes bytes{{10, 20, 40}, {100, 200, 0}};
  const std::vector<BufferEvent> events = {{Kind::kTake, kFirst, Buffer::kWeights},
                                           {Kind::kTake, kFirst, Buffer::kWeights},
                                           {Kind::kUpdate},
                                           {Kind::kTake, kFirst, Buffer::kInbox},
                                           {Kind::kGive, kFirst, Buffer::kWeights},
                                           {Kind::kGive, kFirst, Buffer::kWeights},
                                           {Kind::kTake, kSecond, Buffer::kInbox},
                                           {Kind::kGive, kSecond, Buffer::kInbox},
                                           {Kind::kTake, kSecond, Buffer::kGradients},
                                           {Kind::kGive, kFirst, Buffer::kInbox},
                                           {Kind::kGive, kSecond, Buffer::kGradients},
                                           {Kind::kUpdate}};
  const BufferPeaks found = peaks(events, bytes);
  EXPECT_EQ(found.most, 240);
  EXPECT_EQ(found.at_update, 10);
}

TEST(BufferPeaks, CountIdleBlocksWhereTheyAreKept) {
  const BufferBytes bytes{{10, 16, 21}};
  const std::vector<BufferEvent> reused = {{Kind::kTake, kFirst, Buffer::kGradients},
                                           {Kind::kGive, kFirst, Buffer::kGradients},
                                           {Kind::kTake, kFirst, Buffer::kWeights},
                                           {Kind::kUpdate}};
  EXPECT_EQ(peaks(reused, bytes, true).at_update, 16);
  EXPECT_EQ(peaks(reused, bytes).at_update, 10);
  const std::vector<BufferEvent> too_small = {{Kind::kTake, kFirst, Buffer::kGradients},
                                              {Kind::kGive, kFirst, Buffer::kGradients},
                                              {Kind::kTake, kFirst, Buffer::kInbox},
                                              {Kind::kUpdate}};
  EXPECT_EQ(peaks(too_small, bytes, true).at_update, 21);
}

// A late update ends at the latest where its weights are awaited. The first unit's update is beside
// its own weights; later ones come when the next unit's weights have been taken too.
TEST(BufferEvents, CountALateUpdateInTheForward) {
  const BufferBytes bytes{{10, 0, 0}, {100, 0, 0}, {1000, 0, 0}};
  schedule::StepOptions options;
  EXPECT_EQ(peaks(buffer_events(equal_units(3, 1, 2), options), bytes).at_update, 10);
  options.late_updates = true;
  EXPECT_EQ(peaks(buffer_events(equal_units(3, 1, 2), options), bytes).at_update, 1100);
  const auto on_device = buffer_events(equal_units(3, 1, 2), options, /*on_cpu=*/false);
  EXPECT_EQ(peaks(on_device, bytes).at_update, 0);  // issued before the first weights travel
}

// Whatever the options.
TEST(BufferEvents, EndWithWhatWasSentAheadAlone) {
  for (const bool node_copy : {true, false}) {
    for (int lookahead = 0; lookahead < 4; ++lookahead) {
      schedule::StepOptions options;
      options.lookahead = lookahead;
      options.node_copy = node_copy;
      std::map<std::pair<int, Buffer>, bool> held;
      int num_updates = 0;
      for (const BufferEvent& event : buffer_events(equal_units(4, 2, 2), options)) {
        if (event.kind == Kind::kUpdate)
          ++num_updates;
        else
          held[{event.unit.value(), event.buffer}] = event.kind == Kind::kTake;
      }
      EXPECT_EQ(num_updates, 3 * 4);  // steps, batches
      const auto ahead = node_copy ? std::min(lookahead, 1) : lookahead;
      for (const auto& [which, is_held] : held) {
        const bool sent = which.second == Buffer::kWeights && which.first < ahead;
        EXPECT_EQ(is_held, sent) << which.first << ", lookahead " << lookahead;
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::plan
