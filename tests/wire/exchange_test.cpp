#include "dmuon/wire/exchange.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "tests/wire/groups.h"
#include "tests/wire/pieces.h"

namespace dmuon::wire {
namespace {

struct Case {
  std::vector<std::int64_t> sizes;  // [group size] of the parts
  const char* name;
  bool dealt = false;  // two elements at a time to each member in turn, so that no part is whole
};

const Case kCases[] = {
    {{6, 4}, "Two"},
    {{3, 3, 3}, "Equal"},
    {{0, 7, 2}, "FirstEmpty"},
    {{1, 0, 0}, "OneElement"},
    {{9, 0, 0, 0}, "AllAtTheFirst"},
    {{0, 0, 0, 9}, "AllAtTheLast"},
    {{1, 8, 1, 2}, "Most"},
    {{6, 4}, "TwoDealt", true},
    {{1, 8, 0, 5}, "MostDealt", true},
};

std::vector<layout::Part> parts_of(const std::vector<std::int64_t>& sizes, bool dealt = false) {
  std::vector<layout::Part> parts(sizes.size());
  std::int64_t next = 0;
  std::vector<std::int64_t> left = sizes;
  while (std::any_of(left.begin(), left.end(), [](std::int64_t size) { return size > 0; })) {
    for (std::size_t member = 0; member < parts.size(); ++member) {
      const std::int64_t size = dealt ? std::min<std::int64_t>(left[member], 2) : left[member];
      parts[member].append({next, next + size});
      left[member] -= size;
      next += size;
    }
  }
  return parts;
}

std::int64_t total_of(const std::vector<layout::Part>& parts) {
  std::int64_t total = 0;
  for (const layout::Part& part : parts) total += part.size();
  return total;
}

// [size] where a part's elements lie.
std::vector<std::int64_t> elements_of(const layout::Part& part) {
  std::vector<std::int64_t> elements;
  for (const layout::Segment& segment : part.segments) {
    for (std::int64_t i = segment.begin; i < segment.end; ++i) elements.push_back(i);
  }
  return elements;
}

// [size] small integers: sums over few ranks are exact in fp32 and in bf16.
at::Tensor values_of(int rank, std::int64_t size, at::ScalarType dtype) {
  at::Tensor values = at::empty({size}, at::TensorOptions().dtype(at::kFloat));
  for (std::int64_t i = 0; i < size; ++i) {
    values.mutable_data_ptr<float>()[i] = static_cast<float>((7 * i + 3 * rank) % 11 - 5);
  }
  return values.to(dtype);
}

// To each other member its segments, each in pieces no longer than what fits.
std::int64_t messages_of(const std::vector<layout::Part>& parts, int rank) {
  std::int64_t messages = 0;
  for (std::size_t r = 0; r < parts.size(); ++r) {
    if (static_cast<int>(r) != rank)
      messages += pieces_of(parts[r], total_of(parts), static_cast<int>(parts.size()) - 1);
  }
  return messages;
}

struct Sum {
  at::Tensor values;  // [own part] fp32
  std::int64_t inbox_bytes = 0;
};

Sum reduce(Group& group, const at::Tensor& packed, const std::vector<layout::Part>& parts) {
  const Exchange& exchange = exchange_of(group);
  const at::Tensor inbox = at::empty({exchange.inbox_elements(group, parts)}, packed.options());
  const layout::Part& own = parts[static_cast<std::size_t>(group.rank())];
  Sum sum{at::empty({own.size()}, at::TensorOptions().dtype(at::kFloat)),
          static_cast<std::int64_t>(inbox.nbytes())};
  std::int64_t next = 0;
  exchange.reduce(
      group, packed, parts, inbox,
      [&](std::int64_t begin, const at::Tensor& values, double scale) {
        EXPECT_EQ(begin, next);  // each element once, in order
        EXPECT_EQ(scale, 1.0 / group.size());
        next += values.numel();
        sum.values.narrow(0, begin, values.numel()).copy_(values);
      },
      "x")();
  EXPECT_EQ(next, own.size());
  return sum;
}

class ExchangeReduce : public testing::TestWithParam<std::tuple<Case, at::ScalarType, bool>> {};

TEST_P(ExchangeReduce, LeavesEachSumAtItsMember) {
  const auto& [shape, dtype, disguise] = GetParam();
  const std::vector<layout::Part> parts = parts_of(shape.sizes, shape.dealt);
  const std::int64_t total = total_of(parts);
  const int size = static_cast<int>(shape.sizes.size());
  // Structured bindings are captured by copies alone.
  run_ranks(size, [&, dtype = dtype, disguise = disguise](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, size, kTimeout, disguise);
    EXPECT_EQ(group.free_point_to_point(), !disguise);
    const at::Tensor packed = values_of(rank, total, dtype);
    const Sum sum = reduce(group, packed, parts);
    const std::vector<std::int64_t> own = elements_of(parts[static_cast<std::size_t>(rank)]);
    ASSERT_EQ(sum.values.numel(), std::ssize(own));
    for (std::int64_t i = 0; i < std::ssize(own); ++i) {
      float expected = 0;
      for (int r = 0; r < size; ++r) {
        expected += static_cast<float>((7 * own[static_cast<std::size_t>(i)] + 3 * r) % 11 - 5);
      }
      EXPECT_EQ(sum.values[i].item<float>(), expected) << "rank " << rank << ", element " << i;
    }
    // What gloo's tree moves is not what a rank sends itself.
    if (disguise) return;
    EXPECT_EQ(group.traffic().num_messages, messages_of(parts, rank));
    EXPECT_EQ(group.traffic().num_bytes,
              (total - std::ssize(own)) * static_cast<std::int64_t>(c10::elementSize(dtype)));
    // The inbox is no larger than the buffer, whatever the number of peers; one element of each
    // peer must fit.
    const auto element = static_cast<std::int64_t>(c10::elementSize(dtype));
    EXPECT_LE(sum.inbox_bytes, element * std::max<std::int64_t>(total, size - 1));
  });
}

std::string name_of(const testing::TestParamInfo<ExchangeReduce::ParamType>& given) {
  const auto& [shape, dtype, disguise] = given.param;
  return std::string(shape.name) + (dtype == at::kFloat ? "Float" : "Bfloat16") +
         (disguise ? "ByBackend" : "");
}

INSTANTIATE_TEST_SUITE_P(Cases, ExchangeReduce,
                         testing::Combine(testing::ValuesIn(kCases),
                                          testing::Values(at::kFloat, at::kBFloat16),
                                          testing::Bool()),
                         [](const auto& given) { return name_of(given); });

TEST(Exchange, GathersEachPartFromItsMember) {
  for (const bool disguise : {false, true}) {
    for (const Case& shape : kCases) {
      const std::vector<layout::Part> parts = parts_of(shape.sizes, shape.dealt);
      const int size = static_cast<int>(shape.sizes.size());
      run_ranks(size, [&, disguise](int rank, const StorePtr& store) {
        Group group = make_group(store, "g", rank, size, kTimeout, disguise);
        const at::Tensor packed = values_of(rank, total_of(parts), at::kFloat);
        exchange_of(group).gather(group, packed, parts, "x")();
        for (int member = 0; member < size; ++member) {
          const at::Tensor sent = values_of(member, total_of(parts), at::kFloat);
          for (const std::int64_t i : elements_of(parts[static_cast<std::size_t>(member)]))
            EXPECT_EQ(packed[i].item<float>(), sent[i].item<float>()) << shape.name << ", " << i;
        }
      });
    }
  }
}

// As on a lane: all begin before the first one ends, in one order on all ranks.
TEST(Exchange, HasSeveralUnderWayAtOnce) {
  for (const int size : {2, 3, 5}) {
    run_ranks(size, [size](int rank, const StorePtr& store) {
      Group group(make_process_group(store, "up", rank, size), "g", rank, size, c10::kCPU, {},
                  make_process_group(store, "down", rank, size));
      const Exchange& exchange = exchange_of(group);
      std::vector<std::int64_t> sizes(static_cast<std::size_t>(size), 1);
      sizes[1] = 40;  // which comes in pieces, if it comes from several
      const std::vector<layout::Part> parts = parts_of(sizes);
      const std::int64_t total = total_of(parts);
      std::vector<Rest> rests;
      std::vector<double> sums(2, 0);
      for (const int round : {0, 1}) {
        const at::Tensor packed = values_of(rank, total, at::kFloat);
        const at::Tensor inbox =
            at::empty({exchange.inbox_elements(group, parts)}, packed.options());
        const auto take = [&sums, round](std::int64_t, const at::Tensor& values, double) {
          sums[static_cast<std::size_t>(round)] += values.sum().item<double>();
        };
        rests.push_back(exchange.reduce(group, packed, parts, inbox, take,
                                        "gradients " + std::to_string(round)));
      }
      const at::Tensor weights = values_of(rank, total, at::kFloat);
      rests.push_back(exchange.gather(group, weights, parts, "weights"));
      for (const Rest& rest : rests) rest();
      double expected = 0;
      for (int member = 0; member < size; ++member) {
        const at::Tensor sent = values_of(member, total, at::kFloat);
        for (const std::int64_t i : elements_of(parts[static_cast<std::size_t>(rank)]))
          expected += sent[i].item<double>();
        for (const std::int64_t i : elements_of(parts[static_cast<std::size_t>(member)]))
          EXPECT_EQ(weights[i].item<float>(), sent[i].item<float>());
      }
      EXPECT_EQ(sums, std::vector<double>(2, expected));
    });
  }
}

// The sum of 60,000 and 10,000 is beyond fp16.
TEST(Exchange, SumsWhatIsLargeInFp16) {
  for (const bool disguise : {false, true}) {
    run_ranks(2, [&, disguise](int rank, const StorePtr& store) {
      Group group = make_group(store, "g", rank, 2, kTimeout, disguise);
      const Exchange& exchange = exchange_of(group);
      const at::Tensor packed = at::empty({3}, at::TensorOptions().dtype(at::kHalf));
      packed.fill_(rank == 0 ? 60'000 : 10'000);
      const std::vector<layout::Part> parts = parts_of({3, 0});
      const at::Tensor inbox = at::empty({exchange.inbox_elements(group, parts)}, packed.options());
      std::int64_t taken = 0;
      exchange.reduce(
          group, packed, parts, inbox,
          [&](std::int64_t, const at::Tensor& values, double scale) {
            taken += values.numel();
            EXPECT_NEAR(values[2].item<double>() * scale, 35'000, 32);  // fp16 counts by 32 there
          },
          "x")();
      EXPECT_EQ(taken, rank == 0 ? 3 : 0);
    });
  }
}

// In bf16 256 + 1 is 256 again.
TEST(ExchangeReduce, AddsABf16WireInFp32) {
  run_ranks(3, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 3);
    const at::Tensor packed = at::empty({4}, at::TensorOptions().dtype(at::kBFloat16));
    packed.fill_(rank == 1 ? 256 : 1);
    const Sum sum = reduce(group, packed, parts_of({0, 4, 0}));
    if (rank != 1) return;
    EXPECT_EQ(sum.values.scalar_type(), at::kFloat);
    EXPECT_EQ(sum.values[3].item<float>(), 258);
  });
}

// [999] of a rank: sums over ranks depend on their order.
at::Tensor fractions_of(int rank) {
  std::mt19937 random(static_cast<unsigned>(rank));
  std::uniform_real_distribution<float> distribution(-1, 1);
  at::Tensor values = at::empty({999}, at::TensorOptions().dtype(at::kFloat));
  for (int i = 0; i < 999; ++i) values.mutable_data_ptr<float>()[i] = distribution(random);
  return values;
}

std::vector<float> floats_of(const at::Tensor& values) {
  const auto* data = values.const_data_ptr<float>();
  return {data, data + values.numel()};
}

// Sums of floats depend on their order, so ranks that arrive in another order must not change it.
TEST(ExchangeReduce, GivesTheSameBitsHoweverRanksArrive) {
  std::vector<std::vector<float>> sums;
  for (int late = -1; late < 3; ++late) {
    std::vector<float> got;
    run_ranks(3, [&](int rank, const StorePtr& store) {
      Group group = make_group(store, "g", rank, 3);
      const at::Tensor packed = fractions_of(rank);
      if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const Sum sum = reduce(group, packed, parts_of({999, 0, 0}));
      if (rank == 0) got = floats_of(sum.values);
    });
    sums.push_back(got);
  }
  for (const std::vector<float>& sum : sums) EXPECT_EQ(sum, sums[0]);
}

// Else a parameter's gradient, and so a run, would depend on who owns it.
TEST(ExchangeReduce, GivesTheSameBitsWhicheverMemberSums) {
  constexpr int kRanks = 4;
  std::vector<float> expected = floats_of(fractions_of(0));
  for (int rank = 1; rank < kRanks; ++rank) {
    const std::vector<float> term = floats_of(fractions_of(rank));
    for (std::size_t i = 0; i < term.size(); ++i) expected[i] += term[i];
  }
  for (int owner = 0; owner < kRanks; ++owner) {
    std::vector<std::int64_t> sizes(kRanks, 0);
    sizes[static_cast<std::size_t>(owner)] = 999;
    run_ranks(kRanks, [&](int rank, const StorePtr& store) {
      Group group = make_group(store, "g", rank, kRanks);
      const Sum sum = reduce(group, fractions_of(rank), parts_of(sizes));
      if (rank != owner) return;
      EXPECT_EQ(floats_of(sum.values), expected) << "at rank " << owner;
    });
  }
}

}  // namespace
}  // namespace dmuon::wire
