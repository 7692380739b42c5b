#include "dmuon/plan/cost.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>

#include "dmuon/core/error.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// A device with one finite rate shows one term of the model at a time.
constexpr double kInfinite = std::numeric_limits<double>::infinity();

TEST(ModelledSeconds, CountTheFlopsOfTheCheaperNewtonSchulzForm) {
  const DeviceModel device{"test", 1.0, 1.0, kInfinite, 0.0};
  // Square: direct, 20 m^2 n + 10 m^3. Wide: Gram, 8 m^2 n + 28 m^3. They tie at n = 1.5 m.
  EXPECT_DOUBLE_EQ(modelled_seconds(device, {10, 10}, 1), 30e3);
  EXPECT_DOUBLE_EQ(modelled_seconds(device, {10, 40}, 1), 8 * 4e3 + 28e3);
  EXPECT_DOUBLE_EQ(modelled_seconds(device, {40, 10}, 3), 3 * (8 * 4e3 + 28e3));
  EXPECT_DOUBLE_EQ(modelled_seconds(device, {10, 15}, 1), 40e3);
}

TEST(ModelledSeconds, ChargeAPassPerElementAndLaunchesPerBatch) {
  const DeviceModel memory{"test", kInfinite, 1.0, 60.0, 0.0};
  EXPECT_DOUBLE_EQ(modelled_seconds(memory, {3, 5}, 4), 60);
  const DeviceModel launches{"test", kInfinite, 1.0, kInfinite, 1.0};
  EXPECT_DOUBLE_EQ(modelled_seconds(launches, {3, 3}, 4), 15 + 8);
  EXPECT_DOUBLE_EQ(modelled_seconds(launches, {3, 3}, 1), 15 + 8);
}

TEST(ModelledSeconds, OfProductsDoNotGrowWithABatchUntilTheDeviceIsFull) {
  const DeviceModel device{"test", 1.0, 400.0, kInfinite, 0.0};
  EXPECT_DOUBLE_EQ(modelled_seconds(device, {10, 10}, 4), modelled_seconds(device, {10, 10}, 1));
  EXPECT_DOUBLE_EQ(modelled_seconds(device, {10, 10}, 8),
                   2 * modelled_seconds(device, {10, 10}, 4));
}

TEST(DeviceModel, NamesTheKnownKindsWhenAskedForAnother) {
  for (const std::string& kind : device_kinds()) EXPECT_EQ(device_model(kind).kind, kind);
  try {
    device_model("tpu");
    FAIL() << "did not throw";
  } catch (const core::InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "device_model: device kind must be one of cpu, cuda; got 'tpu'");
  }
}

TEST(MaxBatch, KeepsABatchWithin64MiBOfFp32OrToOneMatrix) {
  EXPECT_EQ(max_batch({2048, 2048}), 4);
  EXPECT_EQ(max_batch({2048, 2049}), 3);
  EXPECT_EQ(max_batch({4096, 4096}), 1);
  EXPECT_EQ(max_batch({100000, 100000}), 1);
  EXPECT_EQ(max_batch({(std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) - 1}), 1);
  EXPECT_EQ(max_batch({8, 8}), 64);
}

TEST(BatchCosts, FindTheCheapestSplitOfArbitraryCosts) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> ticks(0, 40);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> batch_seconds(1 + trial % 5);
    for (double& seconds : batch_seconds) seconds = ticks(random);
    const BatchCosts costs(batch_seconds, 9);
    for (int k = 0; k <= 9; ++k) {
      ASSERT_EQ(costs.best_seconds(k), oracle::cheapest_split(batch_seconds, k));
      const std::vector<int> sizes = costs.best_batches(k);
      EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), 0), k);
      double seconds = 0;
      for (const int size : sizes) seconds += costs.batch_seconds(size);
      EXPECT_EQ(seconds, costs.best_seconds(k));
    }
  }
}

TEST(BatchCosts, RejectCostsThatAreMissingNegativeOrNotFinite) {
  EXPECT_THROW(BatchCosts({}, 1), core::InvalidArgument);
  EXPECT_THROW(BatchCosts({1.0, -1.0}, 1), core::InvalidArgument);
  EXPECT_THROW(BatchCosts({1.0, kInfinite}, 1), core::InvalidArgument);
  EXPECT_THROW(BatchCosts({std::numeric_limits<double>::quiet_NaN()}, 1), core::InvalidArgument);
  EXPECT_THROW(BatchCosts({1.0}, -1), core::InvalidArgument);
}

TEST(ModelledCosts, HaveOneEntryAShapeUpToTheLargestBatch) {
  const ShapeGroups groups =
      group_by_shape({{"a", 2048, 2048, 0}, {"b", 8, 8, 0}, {"c", 8, 8, 0}, {"d", 8, 8, 0}});
  const DeviceModel& device = device_model("cuda");
  const CostTable costs = modelled_costs(groups, device);
  ASSERT_EQ(costs.size(), 2U);
  EXPECT_EQ(costs[0].max_batch(), 1);
  EXPECT_EQ(costs[1].max_batch(), 3);
  EXPECT_EQ(costs[1].batch_seconds(3), modelled_seconds(device, {8, 8}, 3));
}

}  // namespace
}  // namespace dmuon::plan
