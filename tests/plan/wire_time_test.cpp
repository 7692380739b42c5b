#include "dmuon/plan/wire_time.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

constexpr double kBytesPerS = 1000;  // so that a byte takes a millisecond

// Two units of 3 + 1 and 2 + 2 bytes, one byte an element.
Plan by_hand(int num_replicates, const std::vector<int>& owners) {
  Plan plan;
  plan.mesh = {num_replicates, 1};
  plan.inventory = {
      {"a", {1, 3, 1}, 0}, {"b", {1, 1, 1}, 0}, {"c", {1, 2, 1}, 1}, {"d", {1, 2, 1}, 1}};
  plan.owner = oracle::owners(owners);
  plan.options.weight_bytes = 1;
  plan.options.gradient_bytes = 4;
  plan.options.on_cpu = true;
  plan.spread = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  return plan;
}

TEST(WireTime, OfTwoNodesIsThatOfTheBusierDirection) {
  const WireTime time = wire_time(by_hand(2, {0, 1, 0, 1}), kBytesPerS);
  EXPECT_DOUBLE_EQ(time.publish_ms, 3 + 2);
  EXPECT_DOUBLE_EQ(time.route_ms, 4 * (3 + 2));
  EXPECT_DOUBLE_EQ(time.bound_ms, 5 * (2 + 2));
}

TEST(WireTime, MeetsItsBoundOnlyIfNodesSendEquallyMuch) {
  Plan plan = by_hand(2, {0, 1, 0, 1});
  plan.inventory[ParameterIndex(0)].view.rows = 1;
  plan.spread = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  const WireTime even = wire_time(plan, kBytesPerS);
  EXPECT_DOUBLE_EQ(even.publish_ms + even.route_ms, even.bound_ms);
  plan.owner[ParameterIndex(1)] = Owner(0);
  plan.spread = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  const WireTime uneven = wire_time(plan, kBytesPerS);
  EXPECT_GT(uneven.publish_ms + uneven.route_ms, uneven.bound_ms);
  EXPECT_DOUBLE_EQ(uneven.bound_ms, even.bound_ms);
}

// Three bytes go to three nodes, on eight nodes three times down a tree.
TEST(WireTime, CountsTheCopiesThatAnOwnerSends) {
  EXPECT_DOUBLE_EQ(wire_time(by_hand(4, {0, 1, 2, 3}), kBytesPerS).publish_ms, 3 * 3 + 3 * 2);
  EXPECT_DOUBLE_EQ(wire_time(by_hand(8, {0, 1, 2, 3}), kBytesPerS).publish_ms, 3 * 3 + 3 * 2);
  EXPECT_DOUBLE_EQ(wire_time(by_hand(8, {0, 1, 2, 3}), kBytesPerS).bound_ms, 5 * 8 * 7 / 8.);
  EXPECT_DOUBLE_EQ(wire_time(by_hand(5, {0, 1, 2, 3}), kBytesPerS).publish_ms, 3 * 3 + 3 * 2);
  EXPECT_DOUBLE_EQ(wire_time(by_hand(8, {0, 1, 2, 3}), kBytesPerS).route_ms, 4 * 7 * (3 + 2));
}

// Units of a 3, b 1, c 2 and d 2 times 1000 and some elements, which need no gaps in packed
// buffers.
constexpr std::int64_t kSome = 1024;

WireTime of_rings(Mesh mesh, const std::vector<int>& owners, const std::vector<int>& units) {
  Plan plan;
  plan.mesh = mesh;
  for (const std::int64_t rows : {3, 1, 2, 2}) {
    const std::size_t w = plan.inventory.end() - plan.inventory.begin();
    plan.inventory.push_back({std::to_string(w), {1, rows * kSome, 1}, units[w]});
  }
  plan.owner = oracle::owners(owners);
  plan.options.weight_bytes = 1;
  plan.options.gradient_bytes = 4;
  plan.spread = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  return wire_time(plan, kBytesPerS * kSome);
}

// On two nodes a column has half of the bandwidth.
TEST(WireTime, OfRingsIsThatOfTheBusiestColumn) {
  const WireTime apart = of_rings({2, 2}, {0, 2, 1, 1}, {0, 0, 1, 1});
  EXPECT_DOUBLE_EQ(apart.publish_ms, 2 * 4);  // of c and d; of a and b one of four comes back
  EXPECT_DOUBLE_EQ(apart.route_ms, 4 * 2 * 4);
  EXPECT_DOUBLE_EQ(apart.bound_ms, 5 * 8 / 2.);
  EXPECT_DOUBLE_EQ(of_rings({2, 2}, {0, 2, 1, 3}, {0, 0, 1, 1}).publish_ms, 2 * 3);
  EXPECT_DOUBLE_EQ(of_rings({2, 2}, {0, 0, 2, 2}, {0, 0, 1, 1}).publish_ms, 2 * (4 + 4));
}

// However many nodes there are. The member with the least receives the most.
TEST(WireTime, OfRingsIsThatOfAllBytesButTheLeastMembers) {
  for (const int num_nodes : {4, 8}) {
    const WireTime time = of_rings({num_nodes, 1}, {0, 1, 2, 3}, {0, 0, 1, 1});
    EXPECT_DOUBLE_EQ(time.publish_ms, 4 + 4);
    EXPECT_DOUBLE_EQ(time.route_ms, 4 * (4 + 4));
  }
  EXPECT_DOUBLE_EQ(of_rings({3, 1}, {0, 1, 2, 2}, {0, 0, 0, 0}).publish_ms, 3 + 2 + 2);
}

// Eight nodes own a byte each: they receive seven, and send three down their trees.
TEST(WireTime, CountsWhatNodesReceive) {
  Plan plan = by_hand(8, {0, 1, 2, 3});
  plan.inventory.resize(0);
  plan.owner.resize(0);
  for (int node = 0; node < 8; ++node) {
    plan.inventory.push_back({std::to_string(node), {1, 1, 1}, 0});
    plan.owner.emplace_back(node);
  }
  plan.spread = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  const WireTime time = wire_time(plan, kBytesPerS);
  EXPECT_DOUBLE_EQ(time.publish_ms, 7);
  EXPECT_DOUBLE_EQ(time.route_ms, 4 * 7);
  EXPECT_DOUBLE_EQ(time.bound_ms, 5 * 7);
}

TEST(WireTime, CountsEveryPublicationOfAStep) {
  Plan plan = by_hand(2, {0, 1, 0, 1});
  plan.options.node_copy = false;
  EXPECT_DOUBLE_EQ(wire_time(plan, kBytesPerS).publish_ms, 2 * (3 + 2));
  EXPECT_DOUBLE_EQ(wire_time(plan, kBytesPerS).bound_ms, 6 * (2 + 2));
  plan.options.reshard_after_forward = false;
  EXPECT_DOUBLE_EQ(wire_time(plan, kBytesPerS).publish_ms, 3 + 2);
}

TEST(WireTime, OfOneNodeIsNothing) {
  const WireTime time = wire_time(by_hand(1, {0, 0, 0, 0}), kBytesPerS);
  EXPECT_EQ(time.publish_ms + time.route_ms + time.bound_ms, 0);
}

TEST(WireTime, RefusesABandwidthThatIsNone) {
  for (const double bad : {0., -1., std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()}) {
    const std::string message = message_of([&] { wire_time(by_hand(2, {0, 1, 0, 1}), bad); });
    EXPECT_NE(message.find("bytes_per_s"), std::string::npos) << bad;
  }
}

}  // namespace
}  // namespace dmuon::plan
