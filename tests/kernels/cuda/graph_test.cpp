#include "dmuon/kernels/cuda/graph.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "dmuon/kernels/cuda/product.h"
#include "tests/kernels/cuda/gpu.h"

namespace dmuon::kernels::cuda {
namespace {

constexpr std::int64_t kSide = 72;
constexpr std::size_t kEntries = kSide * kSide;

struct Step {
  float rest, decay, factor, clip;
  bool applies;
  float size;  // of the gradient
};
// Changes all that may change from step to step, also the scale that is guessed.
const std::vector<Step> kSteps{{0.05F, 0.99F, -0.1F, 1, true, 1},
                               {0.1F, 0.9F, -0.02F, 0.3F, true, 1e-3F},
                               {0.1F, 0.5F, -0.3F, 0.7F, false, 1e3F},
                               {0.6F, 1, -0.01F, 2, true, 1e3F}};

// A momentum, a direction X, R = X X' / |X|^2 and weights that move by R: all kinds of launches.
struct Update {
  OnGpu<float> gradient{std::vector<float>(kEntries)};
  OnGpu<float> momentum{std::vector<float>(kEntries)};
  OnGpu<float> weights{std::vector<float>(kEntries, 1)};
  OnGpu<std::uint16_t> x{std::vector<std::uint16_t>(kEntries)};
  OnGpu<std::uint16_t> r{std::vector<std::uint16_t>(kEntries)};
  OnGpu<float> memo{std::vector<float>(kMemoWords)};
  OnGpu<float> square{{0}};
  OnGpu<float> partial{std::vector<float>(64)};
  OnGpu<float> scalars{{0, 0, 0}};
  OnGpu<float> clip{{1}};
  OnGpu<std::uint8_t> applies{{1}};

  // What lies on the device for a step.
  void set(const Step& step, void* stream) {
    std::vector<float> values;
    for (std::size_t i = 0; i < kEntries; ++i)
      values.push_back(step.size * std::sin(0.7F * static_cast<float>(i)));
    gradient.set(values);
    clip.set({step.clip});
    applies.set({static_cast<std::uint8_t>(step.applies)});
    const std::vector<float> numbers{step.rest, step.decay, step.factor};
    write_scalars(numbers, scalars.data(), 0, stream);
  }

  void launch(void* stream) const {
    direction({.rows = kSide,
               .cols = kSide,
               .gradient = gradient.data(),
               .momentum = momentum.data(),
               .row_stride = kSide,
               .x = x.data(),
               .x_rows = kSide,
               .x_cols = kSide,
               .memo = memo.data(),
               .squares = square.data(),
               .partial = partial.data(),
               .rest = scalars.data(),
               .eps = 1e-7,
               .gradient_factor = clip.data(),
               .applies = applies.data()},
              0, stream);
    const Matrices operand{x.data(), kSide, 0};
    const Product product{.m = kSide,
                          .inner = kSide,
                          .a = operand,
                          .b = operand,
                          .out = r.data(),
                          .out_row_stride = kSide,
                          .scale = square.data()};
    compute(product, candidates(product, 0).front(), nullptr, nullptr, 0, stream);
    move_weights({.rows = kSide,
                  .cols = kSide,
                  .w = weights.data(),
                  .w_row_stride = kSide,
                  .u = r.data(),
                  .u_row_stride = kSide,
                  .decay = scalars.data() + 1,
                  .factor = scalars.data() + 2,
                  .applies = applies.data()},
                 0, stream);
  }
};

class GraphTest : public GpuTest {
 protected:
  void TearDown() override {
    GpuTest::TearDown();
    auto* const graphs = driver_function<int()>("fake_cuda_graphs");
    EXPECT_EQ(graphs == nullptr ? 0 : graphs(), 0) << "graphs that were not destroyed";
  }

  std::string error_of(const std::function<void()>& work) {
    try {
      const Graph graph(stream_, work);
    } catch (const core::CudaError& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(GraphTest, HasTheBitsOfLaunchesInEachStep) {
  Update launched;
  Update replayed;
  std::unique_ptr<Graph> graph;
  for (const Step& step : kSteps) {
    SCOPED_TRACE(&step - kSteps.data());
    const std::vector<float> before = launched.weights.values();
    launched.set(step, stream_);
    replayed.set(step, stream_);
    launched.launch(stream_);
    if (graph == nullptr) {
      graph = std::make_unique<Graph>(stream_, [&] { replayed.launch(stream_); });
      ASSERT_EQ(synchronise(), 0) << found();
      EXPECT_EQ(replayed.weights.values(), before);  // nothing has run
    }
    graph->launch(stream_);
    ASSERT_EQ(synchronise(), 0) << found();
    EXPECT_EQ(launched.weights.values() != before, step.applies);
    EXPECT_EQ(replayed.weights.values(), launched.weights.values());
    EXPECT_EQ(replayed.momentum.values(), launched.momentum.values());
  }
}

TEST_F(GraphTest, OfWorkThatThrowsLeavesTheStreamAsItWas) {
  Update update;
  update.set(kSteps[0], stream_);
  EXPECT_THROW(Graph(stream_,
                     [&] {
                       update.launch(stream_);
                       throw core::InvalidArgument("of the work");
                     }),
               core::InvalidArgument);
  EXPECT_FALSE(is_captured(stream_));
  EXPECT_EQ(update.weights.values(), std::vector<float>(kEntries, 1));
  update.launch(stream_);
  EXPECT_EQ(synchronise(), 0) << found();
}

TEST_F(GraphTest, RefusesToWaitAndToAllocate) {
  const Update update;
  EXPECT_NE(error_of([&] { synchronise(); }).find("INVALIDATED (901)"), std::string::npos);
  EXPECT_NE(
      error_of([&] { Reserved<float> more(1); }).find("cuStreamEndCapture: CUDA_ERROR_STREAM"),
      std::string::npos);
  EXPECT_EQ(error_of([] {}), "");
  EXPECT_EQ(synchronise(), 0) << found();
}

TEST_F(GraphTest, OfAnotherThreadIsNotDisturbed) {
  Update update;
  update.set(kSteps[0], stream_);
  const Graph graph(stream_, [&] {
    update.launch(stream_);
    std::thread([&] {
      void* context = nullptr;
      call("cuDevicePrimaryCtxRetain", &context, 0);
      call("cuCtxSetCurrent", context);
      const OnGpu<float> more({1});
      EXPECT_EQ(more.values()[0], 1);
    }).join();
  });
  graph.launch(stream_);
  EXPECT_EQ(synchronise(), 0) << found();
  EXPECT_NE(update.weights.values(), std::vector<float>(kEntries, 1));
}

// So a batch is captured on streams as PyTorch makes them. On an H200, too.
TEST_F(GraphTest, OfABlockingStreamIsSpoiltByAnotherThreadsCopy) {
  void* blocking = nullptr;
  ASSERT_EQ(call("cuStreamCreate", &blocking, 0U), 0);
  OnGpu<float> out({0});
  constexpr int kImplicit = 906;
  const auto work = [&] {
    std::thread([&] {
      void* context = nullptr;
      call("cuDevicePrimaryCtxRetain", &context, 0);
      call("cuCtxSetCurrent", context);
      const float one = 1;
      EXPECT_EQ(call("cuMemcpyHtoD_v2", reinterpret_cast<unsigned long long>(out.data()),
                     static_cast<const void*>(&one), sizeof(one)),
                kImplicit);
    }).join();
  };
  EXPECT_THROW(Graph(blocking, work), core::CudaError);
  EXPECT_EQ(synchronise(), 0) << found();
  EXPECT_EQ(out.values()[0], 0);
}

TEST_F(GraphTest, TheFakeDriverReportsALaunchBesideTheCapture) {
  if (driver_function<void()>("fake_cuda_errors") == nullptr) GTEST_SKIP() << "legal on a GPU";
  void* other = nullptr;
  ASSERT_EQ(call("cuStreamCreate", &other, kNonBlocking), 0);
  const OnGpu<float> out({0});
  const std::vector<float> one{1};
  error_of([&] { write_scalars(one, out.data(), 0, other); });
  EXPECT_NE(found().find("write_scalars: is launched beside the capture of its thread"),
            std::string::npos);
}

TEST_F(GraphTest, TheFakeDriverReportsMemoryThatIsNoMore) {
  if (driver_function<void()>("fake_cuda_errors") == nullptr) GTEST_SKIP() << "costs the context";
  auto out = std::make_unique<OnGpu<float>>(std::vector<float>{0});
  const std::vector<float> one{1};
  const Graph graph(stream_, [&] { write_scalars(one, out->data(), 0, stream_); });
  graph.launch(stream_);
  EXPECT_EQ(out->values()[0], 1);
  out.reset();
  graph.launch(stream_);
  EXPECT_EQ(synchronise(), 700);
  EXPECT_NE(found().find("scalars lies outside the device's memory"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
