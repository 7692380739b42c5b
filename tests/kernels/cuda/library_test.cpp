#include "dmuon/kernels/cuda/library.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "tests/kernels/cuda/gpu.h"

namespace dmuon::kernels::cuda {
namespace {

// A row of ones and a direction of ones; `add` adds a number to each weight.
struct Row {
  OnGpu<float> w{std::vector<float>(40, 1)};
  OnGpu<std::uint16_t> u{std::vector<std::uint16_t>(40, 0x3c00)};
  OnGpu<std::uint8_t> applies{{1}};
  OnGpu<float> one{{1}};
  OnGpu<float> factor{{0}};

  /// Two launches: a graph of them keeps `by`, but not the factor.
  void add(float by, void* stream) const {
    write_scalars({{by}}, factor.data(), 0, stream);
    add(stream);
  }
  void add(void* stream) const {
    move_weights({.rows = 1,
                  .cols = 40,
                  .w = w.data(),
                  .w_row_stride = 40,
                  .u = u.data(),
                  .u_row_stride = 40,
                  .decay = one.data(),
                  .factor = factor.data(),
                  .applies = applies.data()},
                 0, stream);
  }
};

template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const core::CudaError& error) {
    return error.what();
  }
  return "";
}

class LibraryTest : public GpuTest {};

TEST_F(LibraryTest, ACaptureRecordsALaunchAndReplaysIt) {
  const Row row;
  EXPECT_FALSE(is_captured(stream_));
  ASSERT_EQ(call("cuStreamBeginCapture_v2", stream_, 0), 0);
  EXPECT_TRUE(is_captured(stream_));
  row.add(2, stream_);
  const CapturedGraph graph(stream_);
  EXPECT_FALSE(is_captured(stream_));
  EXPECT_EQ(row.w.values()[0], 1);  // nothing ran
  for (int i = 0; i < 3; ++i) graph.launch();
  EXPECT_EQ(synchronise(), 0);
  EXPECT_EQ(row.w.values(), std::vector<float>(40, 7));
}

TEST_F(LibraryTest, AWaitInACaptureSpoilsTheCapture) {
  const Row row;
  void* graph = nullptr;
  ASSERT_EQ(call("cuStreamBeginCapture_v2", stream_, 0), 0);
  row.add(2, stream_);
  EXPECT_EQ(synchronise(), 900);
  EXPECT_NE(error_of([&] { row.add(2, stream_); }).find("CAPTURE_INVALIDATED (901)"),
            std::string::npos);
  EXPECT_EQ(call("cuStreamEndCapture", stream_, &graph), 901);
  EXPECT_EQ(graph, nullptr);
  row.add(1, stream_);
  EXPECT_EQ(synchronise(), 0);
  EXPECT_EQ(row.w.values(), std::vector<float>(40, 2));
}

TEST_F(LibraryTest, AThreadWithoutAContextLaunches) {
  const Row row;
  std::thread([&] { row.add(1, stream_); }).join();
  EXPECT_EQ(synchronise(), 0);
  EXPECT_EQ(row.w.values()[39], 2);
}

TEST_F(LibraryTest, AThreadKeepsAContextOfItsOwn) {
  const Row row;
  std::thread([&] {
    void* other = nullptr;
    // The fake driver lacks this function, and takes any context. A GPU's would follow the pointer.
    if (call("cuCtxCreate_v2", &other, 0U, 0) == -1) other = this;
    ASSERT_EQ(call("cuCtxSetCurrent", other), 0);
    row.add(1, stream_);
    void* current = nullptr;
    call("cuCtxGetCurrent", &current);
    EXPECT_EQ(current, other);
    call("cuCtxDestroy_v2", other);
  }).join();
  EXPECT_EQ(synchronise(), 0);
}

TEST_F(LibraryTest, ErrorsNameTheKernelAndTheDriversWord) {
  const Row row;
  MoveWeights move{.rows = 1,
                   .cols = 40,
                   .w = row.w.data(),
                   .w_row_stride = 40,
                   .u = row.u.data(),
                   .u_row_stride = 40,
                   .decay = row.one.data(),
                   .factor = row.one.data(),
                   .applies = row.applies.data()};
  const std::string error = error_of([&] { move_weights(move, 8, stream_); });
  EXPECT_NE(error.find("CUDA kernel move_weights_f16 on device 8"), std::string::npos) << error;
  EXPECT_NE(error.find("CUDA_ERROR_INVALID_DEVICE"), std::string::npos) << error;
  EXPECT_NE(unavailable(8).find("device 8 refuses dmuon's kernels"), std::string::npos);
}

TEST_F(LibraryTest, ALaunchFitsTheKernel) {
  const char parameters[8] = {};
  EXPECT_THROW(launch({"no_such_kernel", 1, 1, 256, 0}, parameters, 8, 0, stream_),
               core::InternalError);
  EXPECT_THROW(launch({"move_weights_f16", 1, 1, 256, 0}, parameters, 8, 0, stream_),
               core::InternalError);
  const std::vector<char> bytes(sizeof(MoveWeightsParameters));
  const auto refused = [&](unsigned grid_x, unsigned threads, unsigned shared_bytes) {
    return error_of([&] {
      launch({"move_weights_f16", grid_x, 1, threads, shared_bytes}, bytes.data(), bytes.size(), 0,
             stream_);
    });
  };
  EXPECT_NE(refused(0, 256, 0).find("CUDA_ERROR_INVALID_VALUE"), std::string::npos);
  EXPECT_NE(refused(1, 256, 60 << 10).find("CUDA_ERROR_INVALID_VALUE"), std::string::npos);
  // __launch_bounds__ in the cubin. Drivers differ in the error's name.
  EXPECT_NE(refused(1, 512, 0), "");
}

TEST_F(LibraryTest, AHopperKernelTakesWholeClustersAndItsSharedMemory) {
  if (!has_product90(0)) GTEST_SKIP() << "compute capability 9.0 alone";
  const std::vector<char> bytes(sizeof(Product90Parameters));
  const auto refused = [&](unsigned grid_x, unsigned shared_words) {
    return error_of([&] {
      launch({"symmetric90_f16", grid_x, 1, kProduct90Threads, 4 * shared_words}, bytes.data(),
             bytes.size(), 0, stream_);
    });
  };
  EXPECT_NE(refused(3, kProduct90SharedWords).find("CUDA_ERROR_INVALID_"), std::string::npos);
  EXPECT_NE(refused(2, kProduct90SharedWords + 1).find("CUDA_ERROR_INVALID_VALUE"),
            std::string::npos);
}

TEST_F(LibraryTest, ATensorMapHasAlignedRowsAndStridesBelow2To40Bytes) {
  if (!has_product90(0)) GTEST_SKIP() << "compute capability 9.0 alone";
  const OnGpu<std::uint16_t> x(std::vector<std::uint16_t>(1024));
  const auto refused = [&](int offset, std::int64_t cols, std::int64_t row_stride,
                           std::int64_t batch_stride) {
    return error_of([&] {
      tensor_map({x.data() + offset, Half::kFp16, 2, 4, cols, row_stride, batch_stride, 64});
    });
  };
  constexpr std::int64_t kMost = (std::int64_t{1} << 39) - 8;  // entries
  EXPECT_EQ(refused(0, 20, 24, 96), "");
  EXPECT_EQ(refused(8, 20, 24, kMost), "");
  for (const std::string& error : {refused(4, 20, 24, 96), refused(0, 20, 28, 96),
                                   refused(0, 0, 24, 96), refused(0, 20, 24, kMost + 8)}) {
    EXPECT_NE(error.find("cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"), std::string::npos)
        << error;
  }
}

// Runs once for each reason, in the environment of CMakeLists.txt.
TEST(Unavailable, SaysWhyInOneSentence) {
  const char* const reason = std::getenv("EXPECTED_REASON");
  if (reason == nullptr) GTEST_SKIP() << "no reason is expected";
  EXPECT_TRUE(unavailable(0).starts_with(reason)) << unavailable(0);
  EXPECT_EQ(unavailable(0).find('\n'), std::string::npos);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
