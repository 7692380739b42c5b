#include "dmuon/engine/reduce.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "tests/engine/rank_threads.h"

namespace dmuon::engine {
namespace {

struct Case {
  std::vector<std::int64_t> sizes;  // [group size] of the segments
  const char* name;
};

const Case kCases[] = {
    {{6, 4}, "Two"},
    {{3, 3, 3}, "Equal"},
    {{0, 7, 2}, "FirstEmpty"},
    {{1, 0, 0}, "OneElement"},
    {{9, 0, 0, 0}, "AllAtTheFirst"},
    {{0, 0, 0, 9}, "AllAtTheLast"},
    {{1, 8, 1, 2}, "Most"},
};

std::vector<Segment> segments_of(const std::vector<std::int64_t>& sizes) {
  std::vector<Segment> segments;
  std::int64_t next = 0;
  for (const std::int64_t size : sizes) {
    segments.push_back({next, next + size});
    next += size;
  }
  return segments;
}

// [size] small integers: sums over few ranks are exact in fp32 and in bf16.
at::Tensor values_of(int rank, std::int64_t size, at::ScalarType dtype) {
  at::Tensor values = at::empty({size}, at::TensorOptions().dtype(at::kFloat));
  for (std::int64_t i = 0; i < size; ++i) {
    values.mutable_data_ptr<float>()[i] = static_cast<float>((7 * i + 3 * rank) % 11 - 5);
  }
  return values.to(dtype);
}

class ReduceSegments : public testing::TestWithParam<std::tuple<Case, at::ScalarType, bool>> {};

TEST_P(ReduceSegments, LeavesEachSumAtItsMember) {
  const auto& [shape, dtype, disguise] = GetParam();
  const std::vector<Segment> segments = segments_of(shape.sizes);
  const std::int64_t total = segments.back().end;
  const int size = static_cast<int>(shape.sizes.size());
  // Structured bindings are captured by copies alone.
  run_ranks(size, [&, dtype = dtype, disguise = disguise](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, size, kTimeout, disguise);
    EXPECT_EQ(group.free_point_to_point(), !disguise);
    const auto pool = std::make_shared<BufferPool>(c10::kCPU);
    const at::Tensor packed = values_of(rank, total, dtype);
    const SegmentSum sum = reduce_segments(group, packed, segments, pool, "x");
    const Segment own = segments[static_cast<std::size_t>(rank)];
    ASSERT_EQ(sum.values.numel(), own.size());
    for (std::int64_t i = 0; i < own.size(); ++i) {
      float expected = 0;
      for (int r = 0; r < size; ++r) {
        expected += static_cast<float>((7 * (own.begin + i) + 3 * r) % 11 - 5);
      }
      EXPECT_EQ(sum.values[i].item<float>(), expected) << "rank " << rank << ", element " << i;
    }
    // What gloo's tree moves is not what a rank sends itself.
    if (disguise) return;
    std::int64_t messages = 0;
    for (int r = 0; r < size; ++r) {
      messages += r != rank && shape.sizes[static_cast<std::size_t>(r)] > 0 ? 1 : 0;
    }
    EXPECT_EQ(group.traffic().num_messages, messages);
    EXPECT_EQ(group.traffic().num_bytes,
              (total - own.size()) * static_cast<std::int64_t>(c10::elementSize(dtype)));
    // The inbox is no larger than the buffer, whatever the number of peers.
    const std::int64_t fp32_sum = dtype == at::kFloat ? 0 : 4 * own.size();
    EXPECT_LE(pool->peak_bytes(), static_cast<std::int64_t>(packed.nbytes()) + fp32_sum);
  });
}

std::string name_of(const testing::TestParamInfo<ReduceSegments::ParamType>& given) {
  const auto& [shape, dtype, disguise] = given.param;
  return std::string(shape.name) + (dtype == at::kFloat ? "Float" : "Bfloat16") +
         (disguise ? "ByBackend" : "");
}

INSTANTIATE_TEST_SUITE_P(Cases, ReduceSegments,
                         testing::Combine(testing::ValuesIn(kCases),
                                          testing::Values(at::kFloat, at::kBFloat16),
                                          testing::Bool()),
                         [](const auto& given) { return name_of(given); });

// In bf16 256 + 1 is 256 again.
TEST(ReduceSegments, AddsABf16WireInFp32) {
  run_ranks(3, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 3);
    const auto pool = std::make_shared<BufferPool>(c10::kCPU);
    const at::Tensor packed = at::empty({4}, at::TensorOptions().dtype(at::kBFloat16));
    packed.fill_(rank == 1 ? 256 : 1);
    const SegmentSum sum = reduce_segments(group, packed, segments_of({0, 4, 0}), pool, "x");
    if (rank != 1) return;
    EXPECT_EQ(sum.values.scalar_type(), at::kFloat);
    EXPECT_EQ(sum.values[3].item<float>(), 258);
  });
}

// Sums of floats depend on their order, so ranks that arrive in another order must not change it.
TEST(ReduceSegments, GivesTheSameBitsHoweverRanksArrive) {
  std::vector<std::vector<float>> sums;
  for (int late = -1; late < 3; ++late) {
    std::vector<float> got;
    run_ranks(3, [&](int rank, const StorePtr& store) {
      Group group = make_group(store, "g", rank, 3);
      const auto pool = std::make_shared<BufferPool>(c10::kCPU);
      std::mt19937 random(static_cast<unsigned>(rank));
      std::uniform_real_distribution<float> distribution(-1, 1);
      const at::Tensor packed = at::empty({999}, at::TensorOptions().dtype(at::kFloat));
      for (int i = 0; i < 999; ++i) packed.mutable_data_ptr<float>()[i] = distribution(random);
      if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const SegmentSum sum = reduce_segments(group, packed, segments_of({999, 0, 0}), pool, "x");
      if (rank == 0) {
        const auto* data = sum.values.const_data_ptr<float>();
        got.assign(data, data + 999);
      }
    });
    sums.push_back(got);
  }
  for (const std::vector<float>& sum : sums) EXPECT_EQ(sum, sums[0]);
}

}  // namespace
}  // namespace dmuon::engine
