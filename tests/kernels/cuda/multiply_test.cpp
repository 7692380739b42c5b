#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "tests/kernels/cuda/emulator/machine_emulated.h"
#include "tests/kernels/cuda/gpu.h"

namespace dmuon::kernels::cuda {
namespace {

std::uint16_t narrow(float v, Half format) {
  return format == Half::kFp16 ? machine::f16_of(v) : machine::bf16_of(v);
}
float wide(std::uint16_t v, Half format) {
  return format == Half::kFp16 ? machine::float_of_f16(v) : machine::float_of_bf16(v);
}

class MultiplyTest : public GpuTest {};

TEST_F(MultiplyTest, HasTheBitsOfAPlainLoop) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const Half format : {Half::kFp16, Half::kBFloat16}) {
    // One eight; a part of a block; two blocks and a part.
    for (const std::size_t entries : {8U, 1000U, 8840U}) {
      const OnGpu<float> factors({0, 0.3F, 0, -4e-3F, 0, 1e-7F});
      std::vector<std::uint16_t> wanted;
      for (std::size_t i = 0; i < 3 * entries; ++i)
        wanted.push_back(narrow(1000 * normal(random), format));
      const OnGpu<std::uint16_t> x(wanted);
      multiply({.batch = 3,
                .entries = static_cast<std::int64_t>(entries),
                .x = x.data(),
                .format = format,
                .factors = factors.data() + 1,
                .factor_stride = 2},
               0, stream_);
      ASSERT_EQ(synchronise(), 0) << found();
      const std::vector<float> all = factors.values();
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const float factor = all[i / entries * 2 + 1];
        wanted[i] = narrow(factor * wide(wanted[i], format), format);
      }
      EXPECT_TRUE(x.values() == wanted) << entries;
    }
  }
}

TEST_F(MultiplyTest, FindsAMatrixFarFromTheFirst) {
  constexpr std::int64_t kEntries = (std::int64_t{1} << 30) + 8;
  Reserved<std::uint16_t> x(3 * kEntries);
  if (x.data() == nullptr) GTEST_SKIP() << "there is no memory of 6 GB";
  const OnGpu<float> factors({1, 1, 3});
  x.set(2 * kEntries, {machine::f16_of(2)});
  only_block(2 * (kEntries / 8 / (kMultiplyThreads * kMultiplyEights) + 1));
  multiply({.batch = 3,
            .entries = kEntries,
            .x = x.data(),
            .factors = factors.data(),
            .factor_stride = 1},
           0, stream_);
  ASSERT_EQ(synchronise(), 0) << found();
  EXPECT_EQ(x.values(2 * kEntries, 1), (std::vector<std::uint16_t>{machine::f16_of(6)}));
}

TEST_F(MultiplyTest, RefusesBadDescriptions) {
  const OnGpu<float> values(std::vector<float>(64));
  const auto refuses = [&](auto change, const std::string& word) {
    Multiply bad{.entries = 16, .x = values.data(), .factors = values.data()};
    change(bad);
    try {
      multiply(bad, 0, stream_);
      ADD_FAILURE() << "accepts " << word;
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuses([](Multiply& m) { m.batch = -1; }, "batch");
  refuses([](Multiply& m) { m.entries = 12; }, "entries");
  refuses([](Multiply& m) { m.x = static_cast<float*>(m.x) + 1; }, "x must be an address");
  refuses([](Multiply& m) { m.factors = nullptr; }, "factors must be an address");
}

}  // namespace
}  // namespace dmuon::kernels::cuda
