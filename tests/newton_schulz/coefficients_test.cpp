#include "dmuon/newton_schulz/coefficients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::newton_schulz {
namespace {

TEST(Coefficients, PolarExpressIsDampedOnEveryRowButTheOneThatRepeats) {
  const auto rows = resolve("polar_express", 9);
  ASSERT_EQ(rows.size(), 9u);
  EXPECT_NEAR(rows[0].a, 7.8925829, 5e-8);
  EXPECT_NEAR(rows[0].b, -20.3830139, 5e-8);
  EXPECT_NEAR(rows[0].c, 13.5553061, 5e-8);
  EXPECT_DOUBLE_EQ(rows[3].a * 1.05, 3.3184196573706015);
  EXPECT_DOUBLE_EQ(rows[4].a * 1.05, 2.300652019954817);
  EXPECT_NEAR(rows[6].a * 1.05, 1.875, 2e-6);
  for (const std::size_t last : {7u, 8u}) {
    EXPECT_EQ(rows[last].a, 1.875);
    EXPECT_EQ(rows[last].b, -1.25);
    EXPECT_EQ(rows[last].c, 0.375);
  }
}

// Independent of the table: what rows do to any singular value in [1.2e-3, 1].
TEST(Coefficients, PolarExpressCarriesSingularValuesNearOne) {
  const auto range = [](int num_steps) {
    double least = 2;
    double most = 0;
    for (double start = 1.2e-3; start <= 1; start *= 1.001) {
      double s = start;
      for (const auto& [a, b, c] : resolve("polar_express", num_steps))
        s = s * (a + s * s * (b + s * s * c));
      least = std::min(least, s);
      most = std::max(most, s);
    }
    return std::pair(least, most);
  };
  const auto [least, most] = range(5);
  EXPECT_NEAR(least, 0.838, 2e-3);
  EXPECT_NEAR(most, 1.124, 2e-3);
  const auto [converged_least, converged_most] = range(10);  // to which more steps go on
  EXPECT_NEAR(converged_least, 1, 1e-6);
  EXPECT_NEAR(converged_most, 1, 1e-6);
}

// At each boundary of what was measured, either order of sides.
TEST(MeasuredSegments, AreThoseOfTheShapeAndTheRows) {
  const auto found = [](const char* name, std::int64_t m, std::int64_t n, int num_steps = 5) {
    const auto segments = measured_segments(resolve(name, num_steps), m, n, at::kBFloat16);
    EXPECT_EQ(segments, measured_segments(resolve(name, num_steps), n, m, at::kBFloat16));
    return segments.value_or(flops::Segments{});
  };
  const flops::Segments none;
  const flops::Segments pairs{2, 1, 2};
  for (const char* name : {"polar_express", "you", "quintic"}) {
    EXPECT_EQ(found(name, 127, 1000), none);
    EXPECT_EQ(found(name, 128, 255), none);
    EXPECT_EQ(found(name, 128, 256), pairs);
    EXPECT_EQ(found(name, 255, 509), none);
    EXPECT_EQ(found(name, 255, 4000), pairs);
    EXPECT_EQ(found(name, 256, 383), none);
    EXPECT_EQ(found(name, 4097, 20000), none);
    EXPECT_EQ(found(name, 1024, 4096, 4), none);
    EXPECT_EQ(found(name, 1024, 4096, 6), none);
  }
  for (const char* name : {"polar_express", "you"}) {
    EXPECT_EQ(found(name, 256, 384), pairs);
    EXPECT_EQ(found(name, 1024, 1536), pairs);
    EXPECT_EQ(found(name, 1025, 2562), none);
    EXPECT_EQ(found(name, 1025, 2563), pairs);
    EXPECT_EQ(found(name, 4096, 10240), pairs);
  }
  EXPECT_EQ(found("quintic", 256, 384), (flops::Segments{3, 1, 1}));
  EXPECT_EQ(found("quintic", 4096, 12287), (flops::Segments{3, 1, 1}));
  EXPECT_EQ(found("quintic", 256, 768), (flops::Segments{3, 2}));
  EXPECT_EQ(found("quintic", 4096, 12288), (flops::Segments{3, 2}));
  EXPECT_EQ(measured_segments({{3, -3.2, 1.2}}, 1024, 4096, at::kBFloat16), std::nullopt);
}

TEST(MeasuredSegments, ArePairsInFp16AndNoneInWiderDtypes) {
  const flops::Segments pairs{2, 1, 2};
  for (const char* name : {"polar_express", "you", "quintic"}) {
    const Coefficients rows = resolve(name, 5);
    for (const auto& [m, n] : {std::pair{128, 128}, {4096, 20000}, {20000, 4096}, {1024, 1100}}) {
      EXPECT_EQ(measured_segments(rows, m, n, at::kHalf), pairs) << name;
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble})
        EXPECT_EQ(measured_segments(rows, m, n, dtype), std::nullopt) << name;
    }
    for (const int side : {127, 4097})
      EXPECT_EQ(measured_segments(rows, side, 20000, at::kHalf), std::nullopt) << name;
    EXPECT_EQ(measured_segments(resolve(name, 4), 1024, 4096, at::kHalf), std::nullopt) << name;
  }
  EXPECT_EQ(measured_segments({{3, -3.2, 1.2}}, 1024, 4096, at::kHalf), std::nullopt);
}

TEST(Coefficients, StepsPastTheTableRepeatTheLastRow) {
  const auto you = resolve("you", 7);
  ASSERT_EQ(you.size(), 7u);
  EXPECT_EQ(you[6].b, -3.0525);
  EXPECT_EQ(you[5].a, 2.8366);
  EXPECT_EQ(you[0].a, 4.0848);
  EXPECT_EQ(resolve("quintic", 3)[2].c, 2.0315);
  EXPECT_EQ(resolve(Coefficients{{1, 2, 3}, {4, 5, 6}}, 3)[2].a, 4);
}

TEST(Coefficients, RowsPastTheStepsAreDropped) {
  EXPECT_EQ(resolve("you", 2).size(), 2u);
  EXPECT_TRUE(resolve("you", 0).empty());
  EXPECT_TRUE(resolve(Coefficients{}, 0).empty());
}

// What singular values in [0.01, 1] become, and what 1.01 does, which rounding to bf16 reaches.
TEST(Coefficients, EverySetMapsSingularValuesNearOne) {
  for (const auto& [name, num_steps] : {std::pair{"polar_express", 5},
                                        {"quintic", 5},
                                        {"you", 5},
                                        {"cans", 5},
                                        {"cubic5", 5},
                                        {"deepseekv4", 10}}) {
    for (int i = 10; i <= 1010; ++i) {
      double s = i / 1000.0;
      for (const auto& [a, b, c] : resolve(name, num_steps))
        s = a * s + b * std::pow(s, 3) + c * std::pow(s, 5);
      EXPECT_NEAR(s, 1, std::string_view(name) == "deepseekv4" ? 1e-3 : 0.33) << name << " " << i;
    }
  }
}

TEST(Coefficients, SchedulesExistForTheirStepsAlone) {
  const Coefficients rows = resolve("deepseekv4", 10);
  EXPECT_EQ(rows[7], resolve("quintic", 1)[0]);
  EXPECT_EQ(rows[8], (Row{2, -1.5, 0.5}));
  for (const int num_steps : {5, 9, 11, 0}) {
    try {
      resolve("deepseekv4", num_steps);
      ADD_FAILURE() << num_steps;
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("num_steps must be 10, the steps of 'deepseekv4'"),
                std::string::npos);
    }
  }
  EXPECT_THROW(resolve("cubic5", 4), core::InvalidArgument);
}

TEST(Coefficients, AolIsRefusedWithTheReason) {
  try {
    resolve("aol", 4);
    FAIL();
  } catch (const core::InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("above 0.88 to negative"), std::string::npos);
  }
}

TEST(Coefficients, AnUnknownNameIsAnsweredWithTheKnownOnes) {
  try {
    resolve("polar", 5);
    FAIL();
  } catch (const core::InvalidArgument& error) {
    for (const char* part : {"polar_express", "quintic", "you", "cans", "cubic5", "got 'polar'"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part;
    }
  }
}

TEST(Coefficients, BadStepsAndRowsAreRejected) {
  EXPECT_THROW(resolve("you", -1), core::InvalidArgument);
  EXPECT_THROW(resolve("you", 100), core::InvalidArgument);
  EXPECT_EQ(resolve("you", 99).size(), 99u);
  EXPECT_THROW(resolve(Coefficients{}, 1), core::InvalidArgument);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(resolve(Coefficients{{1, 2, 3}, {1, nan, 3}}, 1), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::newton_schulz
