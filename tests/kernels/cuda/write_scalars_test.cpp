#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "tests/kernels/cuda/gpu.h"

namespace dmuon::kernels::cuda {
namespace {

class WriteScalarsTest : public GpuTest {};

// Of a part of a launch, of a whole one, and of several.
TEST_F(WriteScalarsTest, WritesEachToItsPlaceAndNothingBesides) {
  for (const std::size_t count : {0, 1, 3, 480, 481, 1400}) {
    SCOPED_TRACE(count);
    std::vector<float> values;
    for (std::size_t i = 0; i < count; ++i) values.push_back(0.1F * static_cast<float>(i) - 7);
    if (count > 1) values[1] = -std::numeric_limits<float>::denorm_min();
    std::vector<float> wanted(count + 2, 9);
    const OnGpu<float> out(wanted);
    std::ranges::copy(values, wanted.begin() + 1);
    write_scalars(values, out.data() + 1, 0, stream_);
    values.assign(count, 0);  // the launches have copied them
    ASSERT_EQ(synchronise(), 0) << found();
    EXPECT_EQ(out.values(), wanted);
  }
}

TEST_F(WriteScalarsTest, RefusesNoAddress) {
  const std::vector<float> one{1};
  EXPECT_THROW(write_scalars(one, nullptr, 0, stream_), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
