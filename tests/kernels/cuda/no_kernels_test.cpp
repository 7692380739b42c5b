#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/library.h"

namespace dmuon::kernels::cuda {
namespace {

TEST(NoKernels, SaysWhatTheBuildSaid) {
  EXPECT_EQ(unavailable(0), "dmuon was built without CUDA kernels: of a test");
  EXPECT_THROW(prepare(0), core::CudaError);
  EXPECT_THROW(launch({"move_weights_f16", 1, 1, 256, 0}, nullptr, 0, 0, nullptr), core::CudaError);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
