#include "dmuon/plan/cost.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <utility>

#include "dmuon/core/error.h"
#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// A device with one finite rate shows one term of the model at a time. Rates are of 10^12 and 10^9
// a second, so that one FLOP, or byte, at a rate of 10^-3, or 1, takes a nanosecond.
Device with_rates(double product_tflops, double symmetric_tflops, double elementwise_gb_per_s,
                  double launch_us, int tiles, double link_gb_per_s) {
  Device device = oracle::a800();
  device.product_tflops = product_tflops;
  device.symmetric_tflops = symmetric_tflops;
  device.elementwise_gb_per_s = elementwise_gb_per_s;
  device.launch_us = launch_us;
  device.tiles = tiles;
  device.link_gb_per_s = link_gb_per_s;
  return device;
}

Device products(double tflops, double symmetric_tflops, int tiles) {
  return with_rates(tflops, symmetric_tflops, kInfinite, 0, tiles, kInfinite);
}

TEST(ModelledNs, CountTheFlopsOfTheCheaperNewtonSchulzForm) {
  const Device device = products(1e-3, 0, 1);
  // Square: direct, 20 m^2 n + 10 m^3. Wide: Gram, 8 m^2 n + 28 m^3. They tie at n = 1.5 m.
  EXPECT_EQ(modelled_ns(device, {10, 10}, 1), 30'000);
  EXPECT_EQ(modelled_ns(device, {10, 40}, 1), 8 * 4'000 + 28'000);
  EXPECT_EQ(modelled_ns(device, {40, 10}, 3), 3 * (8 * 4'000 + 28'000));
  EXPECT_EQ(modelled_ns(device, {10, 15}, 1), 40'000);
}

TEST(ModelledNs, CountASymmetricProductOnceAtItsOwnRate) {
  // Direct: 5 m^2 n + 5 m^3 symmetric, half of the full FLOPs; 10 m^2 n plain.
  EXPECT_EQ(modelled_ns(products(kInfinite, 1e-3, 1), {10, 10}, 1), 10'000);
  EXPECT_EQ(modelled_ns(products(1e-3, 1e-3, 1), {10, 10}, 1), 20'000);
  // Gram: 2 m^2 n + 14 m^3 symmetric, 4 m^2 n plain.
  EXPECT_EQ(modelled_ns(products(1e-3, 2e-3, 1), {10, 10}, 1), 12'000);
}

TEST(ModelledNs, WorkOnTheTilesOfATriangleOnlyWhereProductsAreSymmetric) {
  // 256 x 256: four tiles, three of them in the triangle. On three tiles at once a symmetric
  // product is one round and a plain one two, of which a third is idle.
  const double flops = 256.0 * 256 * 256;
  EXPECT_EQ(modelled_ns(products(kInfinite, 1, 3), {256, 256}, 1),
            static_cast<Nanoseconds>(10 * flops / 1e3 + 0.5));
  EXPECT_EQ(modelled_ns(products(1, 0, 3), {256, 256}, 1),
            static_cast<Nanoseconds>(30 * flops * 1.5 / 1e3 + 0.5));
}

TEST(ModelledNs, OfProductsDoNotGrowWithABatchUntilTheDeviceIsFull) {
  const Device device = products(1e-3, 0, 4);
  EXPECT_EQ(modelled_ns(device, {10, 10}, 4), modelled_ns(device, {10, 10}, 1));
  EXPECT_EQ(modelled_ns(device, {10, 10}, 8), 2 * modelled_ns(device, {10, 10}, 4));
}

TEST(ModelledNs, ChargePassesByTheElementAndLaunchesByTheBatch) {
  const Device memory = with_rates(kInfinite, 0, 1.0, 0, 1, kInfinite);
  EXPECT_EQ(modelled_ns(memory, {3, 5}, 4), 60 * 60);
  const Device launches = with_rates(kInfinite, 0, kInfinite, 1.0, 1, kInfinite);
  EXPECT_EQ(modelled_ns(launches, {3, 3}, 4), (15 + 8) * 1'000);
  EXPECT_EQ(modelled_ns(launches, {3, 3}, 1), (15 + 8) * 1'000);
}

TEST(ModelledNs, ChargeTheGatherAndScatterOfWhatIsOverTensorParallelRanks) {
  const Device link = with_rates(kInfinite, 0, kInfinite, 0, 1, 1.0);
  const Shape over{3, 5, true};
  // fp32, there and back, from the other 3 of 4 ranks.
  EXPECT_EQ(modelled_ns(link, over, 4, 4), 2 * 4 * 4 * 15 * 3 / 4);
  EXPECT_EQ(modelled_ns(link, over, 1, 2), 2 * 4 * 15 / 2);
  EXPECT_EQ(modelled_ns(link, over, 4, 1), 0);
  EXPECT_EQ(modelled_ns(link, {3, 5, false}, 4, 4), 4 * 4 * 15 * 3);  // whole results
  const Device launches = with_rates(kInfinite, 0, kInfinite, 1.0, 1, kInfinite);
  EXPECT_EQ(modelled_ns(launches, over, 1, 2), (15 + 8 + 2) * 1'000);
}

TEST(ModelledNs, GrowWithEverySideAndBatchAndShrinkWithSymmetricProducts) {
  Device plain = oracle::a800();
  plain.symmetric_tflops = 0;
  for (const std::int64_t side : {64, 200, 1024, 3584}) {
    Nanoseconds previous = 0;
    for (const std::int64_t rows : {64, 130, 512, 3000, 20000}) {
      const Nanoseconds one = modelled_ns(oracle::a800(), {rows, side}, 1);
      EXPECT_GT(one, previous);
      EXPECT_EQ(one, modelled_ns(oracle::a800(), {side, rows}, 1));
      EXPECT_LT(one, modelled_ns(plain, {rows, side}, 1));
      previous = one;
      Nanoseconds smaller = one;
      for (const int num_batch : {2, 3, 5, 8, 64}) {
        const Nanoseconds batch = modelled_ns(oracle::a800(), {rows, side}, num_batch);
        EXPECT_GE(batch, smaller);
        EXPECT_LE(batch, num_batch * one);
        smaller = batch;
      }
    }
  }
}

TEST(ModelledNs, RejectWhatNoPlanCouldAddUp) {
  const Shape huge{std::int64_t{1} << 30, std::int64_t{1} << 30};
  EXPECT_NE(message_of([&] { modelled_ns(products(1e-3, 0, 1), huge, 1); }).find("1073741824"),
            std::string::npos);
}

TEST(WithExchange, AddsToMeasuredTimesWhatTravels) {
  Device link = products(kInfinite, kInfinite, 1);
  link.link_gb_per_s = 1;
  const CostTable measured = oracle::table({{100}});
  const Shape whole = measured.shapes.front().shape;
  Shape cut = whole;
  cut.tensor_parallel = true;
  const CostTable over = with_exchange(measured, link, 4);
  ASSERT_EQ(over.shapes.size(), 2U);
  EXPECT_EQ(over.shapes[0].shape, whole);
  EXPECT_EQ(over.shapes[0].batches.front().ns, 100 + 4 * 3 * whole.num_elements());
  EXPECT_EQ(over.shapes[1].shape, cut);
  EXPECT_EQ(over.shapes[1].batches.front().ns, 100 + 2 * 4 * whole.num_elements() * 3 / 4);
  EXPECT_EQ(with_exchange(over, link, 4), over);
  EXPECT_EQ(with_exchange(measured, link, 1), measured);
}

TEST(CandidateBatches, StayWithinTheMatricesAnd64MiBOfFp32OrOneMatrix) {
  using Sizes = std::vector<int>;
  EXPECT_EQ(candidate_batches({8, 8}, 100), (Sizes{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}));
  EXPECT_EQ(candidate_batches({8, 8}, 7), (Sizes{1, 2, 3, 4, 6}));
  EXPECT_EQ(candidate_batches({8, 8}, 1), Sizes{1});
  EXPECT_EQ(candidate_batches({8, 8}, 0), Sizes{1});
  EXPECT_EQ(candidate_batches({2048, 2048}, 100), (Sizes{1, 2, 3, 4}));
  EXPECT_EQ(candidate_batches({2048, 2049}, 100), (Sizes{1, 2, 3}));
  EXPECT_EQ(candidate_batches({4096, 4096}, 100), Sizes{1});
  EXPECT_EQ(candidate_batches({100000, 100000}, 100), Sizes{1});
  constexpr std::int64_t kMaxSide = (std::int64_t{1} << 31) - 1;
  EXPECT_EQ(candidate_batches({kMaxSide, kMaxSide}, 100), Sizes{1});
}

TEST(ModelledCosts, HaveOneEntryAShapeInTheGroupsOrderUpToTheLargestBatch) {
  const ShapeGroups groups = group_by_shape({{"a", {1, 2048, 2048}, 0},
                                             {"b", {1, 8, 8}, 0},
                                             {"c", {1, 8, 8}, 0},
                                             {"d", {1, 8, 8}, 0, true}});
  const Device device = oracle::a800();
  const CostTable costs = modelled_costs(groups, device, 2);
  EXPECT_EQ(costs.source, "model of a800");
  ASSERT_EQ(costs.shapes.size(), 3U);
  EXPECT_EQ(costs.shapes[0].batches,
            (std::vector<BatchTime>{{1, modelled_ns(device, {2048, 2048}, 1, 2)}}));
  EXPECT_EQ(costs.shapes[1].batches,
            (std::vector<BatchTime>{{1, modelled_ns(device, {8, 8}, 1, 2)},
                                    {2, modelled_ns(device, {8, 8}, 2, 2)}}));
  EXPECT_EQ(costs.shapes[2].shape, (Shape{8, 8, true}));
  EXPECT_EQ(costs.shapes[2].batches[0].ns, modelled_ns(device, {8, 8, true}, 1, 2));
  EXPECT_GT(costs.shapes[2].batches[0].ns, costs.shapes[1].batches[0].ns);
}

// Blocks of columns cost what as many matrices of a stack do; two of these shapes share an entry.
TEST(ModelledCosts, KnowNoLayout) {
  const ShapeGroups groups =
      group_by_shape({{"a", {1, 8, 24, 3}, 0}, {"b", {1, 8, 24, 3, true}, 0}, {"c", {1, 8, 8}, 0}});
  const Device device = oracle::a800();
  const CostTable costs = modelled_costs(groups, device);
  ASSERT_EQ(costs.shapes.size(), 2U);
  EXPECT_EQ(costs.shapes[0].shape, (Shape{8, 8, false, 3}));
  EXPECT_EQ(costs.shapes[0].batches, (std::vector<BatchTime>{{1, modelled_ns(device, {8, 8}, 3)},
                                                             {2, modelled_ns(device, {8, 8}, 6)}}));
  const balance::Instance instance = instance_of(groups, costs, 2, "muon");
  for (const int shape : {0, 1}) {
    EXPECT_EQ(instance.shapes[ShapeIndex(shape)].batches, costs.shapes[0].batches);
    EXPECT_EQ(instance.shapes[ShapeIndex(shape)].num_matrices, 1);
    EXPECT_EQ(instance.shapes[ShapeIndex(shape)].bytes, 12 * 8 * 24);
  }
}

// Parts are updated one after the other, each in a batch of its own.
TEST(BatchTimes, OfInterleavedRowsAddUpThoseOfTheirParts) {
  const Shape shape{96, 6, false, 1, 1, false, {16, 8, 8}};
  const ShapeGroups groups = group_by_shape({{"a", {1, 96, 6, 1, false, {16, 8, 8}}, 0},
                                             {"b", {1, 96, 6, 1, false, {16, 8, 8}}, 1},
                                             {"c", {1, 48, 6}, 1}});
  const CostTable table = modelled_costs(groups, oracle::a800());
  ASSERT_EQ(table.shapes.size(), 2U);  // 48 x 6, which is also the shape of c, and 24 x 6
  EXPECT_EQ(table.shapes[0].shape, (Shape{48, 6}));
  EXPECT_EQ(table.shapes[0].batches.back().size, 3);
  EXPECT_EQ(table.shapes[1].shape, (Shape{24, 6}));
  EXPECT_EQ(table.shapes[1].batches.back().size, 2);
  const std::vector<BatchTime> times = batch_times(table, shape);
  ASSERT_EQ(times.size(), 2U);
  for (const BatchTime& batch : times) {
    EXPECT_EQ(batch.ns, modelled_ns(oracle::a800(), {48, 6}, batch.size) +
                            2 * modelled_ns(oracle::a800(), {24, 6}, batch.size));
  }
  const balance::Instance instance = instance_of(groups, table, 2, "muon");
  EXPECT_EQ(instance.shapes[ShapeIndex(0)].batches, times);
  EXPECT_EQ(instance.shapes[ShapeIndex(0)].bytes, 12 * 96 * 6);
}

TEST(Device, WithAConstantThatIsNoRateIsRejectedByName) {
  EXPECT_NO_THROW(validate(oracle::a800()));
  const std::pair<const char*, std::function<void(Device&)>> bad[] = {
      {"product_tflops", [](Device& d) { d.product_tflops = 0; }},
      {"symmetric_tflops", [](Device& d) { d.symmetric_tflops = -1; }},
      {"elementwise_gb_per_s", [](Device& d) { d.elementwise_gb_per_s = kInfinite; }},
      {"launch_us", [](Device& d) { d.launch_us = std::numeric_limits<double>::quiet_NaN(); }},
      {"tiles", [](Device& d) { d.tiles = 0; }},
      {"link_gb_per_s", [](Device& d) { d.link_gb_per_s = -2; }},
      {"training_tflops", [](Device& d) { d.training_tflops = 0; }},
      {"memory_gb", [](Device& d) { d.memory_gb = kInfinite; }},
  };
  for (const auto& [name, spoil] : bad) {
    Device device = oracle::a800();
    spoil(device);
    const std::string message = message_of([&, &spoiled = device] { validate(spoiled); });
    EXPECT_NE(message.find(name), std::string::npos) << name << ": " << message;
    EXPECT_NE(message.find("a800"), std::string::npos) << message;
  }
}

TEST(Network, WithAConstantThatIsNoRateIsRejectedByName) {
  const Network good = {"n", "", "", 22, 0, true};
  EXPECT_NO_THROW(validate(good));
  Network network = good;
  network.gb_per_s = kInfinite;
  EXPECT_EQ(message_of([&] { validate(network); }),
            "Network 'n': gb_per_s must be finite and > 0; got inf");
  network = good;
  network.latency_us = -1;
  EXPECT_EQ(message_of([&] { validate(network); }),
            "Network 'n': latency_us must be finite and >= 0; got -1");
}

TEST(InstanceOf, TakesEveryShapeFromTheTableInWhicheverOrderItIsThere) {
  const ShapeGroups groups =
      group_by_shape({{"a", {1, 2, 3}, 0}, {"b", {1, 4, 4}, 0}, {"c", {1, 2, 3}, 0}});
  const CostTable costs = {"by hand",
                           {{{4, 4}, {{1, 7}}}, {{9, 9}, {{1, 8}}}, {{2, 3}, {{1, 5}, {2, 6}}}}};
  const balance::Instance instance = instance_of(groups, costs, 3, "muon");
  EXPECT_EQ(instance.num_owners, 3);
  EXPECT_EQ(instance.shapes, (PerShape<balance::CostedShape>{{2, {{1, 5}, {2, 6}}, 12 * 6},
                                                             {1, {{1, 7}}, 12 * 16}}));
}

TEST(InstanceOf, NamesAShapeThatIsMissingOrThereTwice) {
  const ShapeGroups groups = group_by_shape({{"a", {1, 2, 3}, 0, true}});
  const auto of = [&](const CostTable& costs) {
    return message_of([&] { instance_of(groups, costs, 1, "muon"); });
  };
  const ShapeCosts plain{{2, 3}, {{1, 5}}};
  const ShapeCosts over{{2, 3, true}, {{1, 5}}};
  EXPECT_EQ(of({"", {plain, over}}), "");
  EXPECT_EQ(of({"", {plain}}), "costs: expected an entry for shape 2 x 3 over TP; got none");
  EXPECT_EQ(of({"", {over, plain, over}}),
            "costs: expected one entry for shape 2 x 3 over TP; got two");
  EXPECT_NE(of({"", {{{2, 3, true}, {}}}}), "");
  EXPECT_NE(of({"", {{{2, 3, true}, {{2, 5}}}}}), "");
  EXPECT_NE(of({"", {{{2, 3, true}, {{1, 5}, {3, 7}, {2, 6}}}}}), "");
  EXPECT_NE(of({"", {{{2, 3, true}, {{1, -5}}}}}), "");
}

TEST(CostsFromJson, ReadBackWhatToJsonWrote) {
  const CostTable table = {"\"quoted\" \u00e9 \\ \n",
                           {{{1, 2, true}, {{1, 0}, {7, 1LL << 60}}}, {{3, 4, false, 5}, {}}}};
  EXPECT_EQ(costs_from_json(to_json(table)), table);
  EXPECT_EQ(to_json(costs_from_json(to_json(table))), to_json(table));
  EXPECT_EQ(costs_from_json(to_json(CostTable{})), CostTable{});
}

TEST(ModelledNs, OfAStackAreThoseOfABatchOfItsMatrices) {
  const Device device = with_rates(1e-3, 0, 1.0, 1.0, 4, kInfinite);
  EXPECT_EQ(modelled_ns(device, {10, 20, false, 6}, 2), modelled_ns(device, {10, 20}, 12));
  EXPECT_GT(modelled_ns(device, {10, 20, false, 6}, 2), modelled_ns(device, {10, 20}, 2));
}

TEST(CostsFromJson, TakeAnAbsentTensorParallelForFalse) {
  const CostTable table = costs_from_json(
      R"({"schema_version": 1, "source": "x", "shapes": [{"rows": 2, "cols": 3, "batches": []}]})");
  EXPECT_EQ(table.shapes[0].shape, (Shape{2, 3, false}));
}

}  // namespace
}  // namespace dmuon::plan
