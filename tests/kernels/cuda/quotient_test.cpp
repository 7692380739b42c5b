#include "dmuon/kernels/cuda/quotient.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>

namespace dmuon::kernels::cuda {
namespace {

TEST(Quotient, IsThatOfTheDivision) {
  constexpr int kMost = std::numeric_limits<int>::max();
  std::mt19937 random(1);
  const auto any = [&] { return static_cast<int>(random() >> (1 + random() % 31)); };
  for (int i = 0; i < 20000; ++i) {
    const int by = i < 3000 ? i + 1 : i < 3100 ? kMost - (i - 3000) : any() + (i % 2);
    if (by < 1) continue;
    const Divisor divisor = Divisor::by(static_cast<std::uint32_t>(by));
    const int multiple = kMost / by * by;
    for (const int n : {0, 1, by - 1, by, multiple - 1, multiple, kMost, any(), any()})
      ASSERT_EQ(device::quotient(n, divisor), n / by) << n << " / " << by;
  }
}

}  // namespace
}  // namespace dmuon::kernels::cuda
