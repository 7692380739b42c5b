#include "dmuon/balance/instance.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "dmuon/core/error.h"

namespace dmuon::balance {
namespace {

constexpr Nanoseconds kMost = std::numeric_limits<Nanoseconds>::max();
constexpr int kMostMatrices = std::numeric_limits<int>::max();

Instance usual() {
  return {.shapes = {{.num_matrices = 3, .batches = {{1, 10}, {2, 15}}, .bytes = 8},
                     {.num_matrices = 2, .batches = {{1, 7}}, .bytes = 4}},
          .num_owners = 2};
}

// What validate says; empty if it accepts.
std::string refusal(const Instance& instance) {
  try {
    validate(instance);
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
  return {};
}

void expect_refused(const Instance& instance, const std::string& part) {
  EXPECT_NE(refusal(instance).find(part), std::string::npos)
      << '"' << refusal(instance) << "\" does not name " << part;
}

TEST(Validate, AcceptsWhatIsMeasured) {
  EXPECT_EQ(refusal(usual()), "");
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({.shapes = {{0, {{1, 0}}}}}), "");
}

TEST(Validate, WantsAnOwner) {
  for (const int num_owners : {0, -1}) {
    Instance instance = usual();
    instance.num_owners = num_owners;
    expect_refused(instance, "num_owners");
  }
}

TEST(Validate, WantsBatchesOfOneAndThenLargerOnes) {
  const std::vector<std::vector<BatchTime>> bad = {
      {}, {{2, 5}}, {{0, 1}, {1, 5}}, {{1, 5}, {1, 5}}, {{1, 5}, {4, 9}, {2, 9}}, {{-1, 5}}};
  for (const std::vector<BatchTime>& batches : bad) {
    Instance instance = usual();
    instance.shapes[ShapeIndex(1)].batches = batches;
    expect_refused(instance, "shapes[1].batches");
  }
}

TEST(Validate, RefusesWhatIsNegative) {
  Instance time = usual();
  time.shapes[ShapeIndex(0)].batches[1].ns = -1;
  expect_refused(time, "shapes[0].batches");
  Instance bytes = usual();
  bytes.shapes[ShapeIndex(1)].bytes = -1;
  expect_refused(bytes, "shapes[1].bytes");
  Instance count = usual();
  count.shapes[ShapeIndex(1)].num_matrices = -1;
  expect_refused(count, "shapes[1].num_matrices");
  Instance cap = usual();
  cap.max_bytes = -1;
  expect_refused(cap, "max_bytes");
}

TEST(Validate, RefusesTimesBeyondTheLimitAlone) {
  for (const Nanoseconds ns : {kMaxTotalNs + 1, Nanoseconds{1} << 62, kMost}) {
    // Nobody has two matrices: a batch that is never used is refused all the same.
    expect_refused({.shapes = {{1, {{1, 1}, {2, ns}}}}}, "shapes[0].batches");
  }
  EXPECT_EQ(refusal({.shapes = {{1, {{1, kMaxTotalNs}, {2, kMaxTotalNs}}}}}), "");
}

TEST(Validate, RefusesTimesBeyondTheLimitTogether) {
  const CostedShape half{2, {{1, kMaxTotalNs / 4}}};
  EXPECT_EQ(refusal({.shapes = {half, half}}), "");
  expect_refused({.shapes = {half, half, {1, {{1, 1}}}}}, "times of all matrices");
  // In 64 bits each of these products would wrap around, and so would their sum.
  const CostedShape most{kMostMatrices, {{1, kMaxTotalNs}}};
  expect_refused({.shapes = {most, most, most}}, "times of all matrices");
  expect_refused({.shapes = {{1 << 4, {{1, kMaxTotalNs}}}}}, "times of all matrices");
}

TEST(Validate, RefusesBytesBeyondTheLimitTogether) {
  const CostedShape whole{4, {{1, 1}}, kMaxTotalNs / 4};
  EXPECT_EQ(refusal({.shapes = {whole}}), "");
  expect_refused({.shapes = {whole, {1, {{1, 1}}, 1}}}, "bytes of all matrices");
  expect_refused({.shapes = {{kMostMatrices, {{1, 0}}, kMost}}}, "bytes of all matrices");
  // Nobody has one: its bytes do not count.
  EXPECT_EQ(refusal({.shapes = {{0, {{1, 0}}, kMost}}}), "");
}

}  // namespace
}  // namespace dmuon::balance
