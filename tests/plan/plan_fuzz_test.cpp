#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

constexpr int kNumMutations = 4000;
using namespace std::string_view_literals;
constexpr std::string_view kBytes = "0123456789-+.eE{}[]:,\"\\ntrufalsx \t\n\0\x7f\x80\xc3\xff"sv;

std::size_t place_in(balance::Random& random, const std::string& text) {
  return static_cast<std::size_t>(random() % text.size());
}

// A byte changed, put in or left out, or a part copied over another or cut out.
void mutate(std::string& text, balance::Random& random) {
  const std::size_t at = place_in(random, text);
  const char byte = kBytes[static_cast<std::size_t>(random() % kBytes.size())];
  const auto length = static_cast<std::size_t>(draw(random, 1, 40));
  switch (draw(random, 0, 5)) {
    case 0:
      text[at] = byte;
      break;
    case 1:
      text.insert(at, 1, byte);
      break;
    case 2:
      text.erase(at, 1);
      break;
    case 3:
      text.insert(at, text.substr(place_in(random, text), length));
      break;
    case 4:
      if (length < text.size() / 2) text.erase(at, length);
      break;
    default: {
      // Digits, where most of the meaning is.
      const std::size_t digit = text.find_first_of("0123456789", at);
      if (digit != std::string::npos) text[digit] = static_cast<char>('0' + draw(random, 0, 9));
    }
  }
}

// @return whether it was a plan all the same.
bool read(const std::string& text) {
  try {
    const Plan plan = from_json(text);
    const std::string again = to_json(plan);
    EXPECT_EQ(from_json(again), plan) << text;
    EXPECT_EQ(to_json(from_json(again)), again) << text;
    EXPECT_LE(plan.bound_ns(), plan.makespan_ns()) << text;
    return true;
  } catch (const core::InvalidArgument&) {
    return false;
  }
}

TEST(FromJson, TakesNoMutationForWhatItIsNot) {
  balance::Random random(16);
  PlanOptions options;
  options.layout_slack = 0;
  const std::string texts[] = {
      to_json(make_plan(oracle::inventory({0, 1, 0, 2}), {1, 3}, "load_balance",
                        oracle::table({{4, 5}, {6}, {9}}), options)),
      to_json(make_plan(oracle::inventory({0, 0, 0}), {2, 1, 2}, "xor_layout",
                        oracle::table({{4, 5}}))),
      to_json(make_plan_from_counts(oracle::inventory({0, 1, 0, 0}), {1, 2}, "p", {{3, 0}, {0, 1}},
                                    oracle::table({{5, 6}, {9}}))),
  };
  int num_read = 0;
  for (int trial = 0; trial < kNumMutations; ++trial) {
    std::string text = texts[trial % 3];
    for (int i = draw(random, 1, 3); i > 0; --i) mutate(text, random);
    num_read += read(text) ? 1 : 0;
    if (HasFailure()) FAIL() << "trial " << trial;
  }
  // Names, numbers for readers and the like may change: neither kind is empty.
  EXPECT_GT(num_read, kNumMutations / 20);
  EXPECT_LT(num_read, kNumMutations / 2);
}

TEST(FromJson, TakesNoBeginningOfAPlanForAPlan) {
  const std::string text =
      to_json(make_plan(oracle::inventory({0, 1}), {1, 2}, "rank0", oracle::table({{4}, {6}})));
  ASSERT_TRUE(read(text));
  for (std::size_t size = 0; size < text.size(); ++size) {
    ASSERT_FALSE(read(text.substr(0, size))) << size;
  }
}

}  // namespace
}  // namespace dmuon::plan
