#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/symmetric.h"
#include "tests/kernels/cuda/gpu.h"

// Choices and refusals; symmetric_test.cpp has results.
namespace dmuon::kernels::cuda {
namespace {

class SymmetricDescriptionTest : public GpuTest {};

TEST_F(SymmetricDescriptionTest, OffersSplitsWhereTilesDoNotFillTheDevice) {
  Symmetric product;
  product.m = 512;
  product.inner = 2048;
  const auto few = candidates(product, 0);
  const auto has = [](const auto& choices, const SymmetricChoice& choice) {
    return std::ranges::find(choices, choice) != choices.end();
  };
  EXPECT_TRUE(has(few, {"symmetric80_64", 1}) && has(few, {"symmetric80_128", 1}));
  EXPECT_TRUE(has(few, {"symmetric80_128", 8}));
  EXPECT_GT(few.front().splits, 1);
  for (const SymmetricChoice& choice : few) {
    const std::int64_t tiles = choice.kernel == "symmetric80_64" ? 36 : 10;
    const std::int64_t side = choice.kernel == "symmetric80_64" ? 64 : 128;
    const std::int64_t parts = choice.splits == 1 ? 0 : tiles * choice.splits;
    EXPECT_EQ(num_tickets(product, choice, 0), choice.splits == 1 ? 0 : tiles);
    EXPECT_EQ(workspace_bytes(product, choice, 0), parts * side * side * 4);
  }
  product.batch = 100;
  EXPECT_EQ(candidates(product, 0).size(), 2U);  // the batch fills it
  product.batch = 1;
  product.inner = 8;
  EXPECT_EQ(candidates(product, 0).size(), 2U);  // there is nothing to split
}

TEST_F(SymmetricDescriptionTest, RefusesBadDescriptions) {
  const OnGpu<std::uint16_t> values(std::vector<std::uint16_t>(1024));
  const auto refuses = [&](auto change, const std::string& words) {
    Symmetric bad;
    bad.m = bad.inner = 16;
    bad.a = bad.b = bad.c = {values.data(), 16, 0};
    bad.beta = 1;
    bad.out = values.data() + 512;
    bad.out_row_stride = 16;
    SymmetricChoice choice{"symmetric80_64", 1};
    change(bad, choice);
    try {
      symmetric(bad, choice, nullptr, nullptr, 0, stream_);
      ADD_FAILURE() << "accepts " << words;
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  using Choice = SymmetricChoice;
  refuses([](Symmetric& s, Choice&) { s.batch = 65536; }, "batch must be in [0, 65535]");
  refuses([](Symmetric& s, Choice&) { s.m = -1; }, "m must be");
  refuses([](Symmetric& s, Choice&) { s.inner = std::int64_t{1} << 31; }, "inner must be");
  refuses([](Symmetric& s, Choice&) { s.a.data = nullptr; }, "a must be an address");
  refuses([&](Symmetric& s, Choice&) { s.b.data = values.data() + 1; }, "b must be an address");
  refuses([](Symmetric& s, Choice&) { s.a.row_stride = 8; }, "the row stride of a");
  refuses([](Symmetric& s, Choice&) { s.c.row_stride = 17; }, "the row stride of c");
  refuses([](Symmetric& s, Choice&) { s.b.batch_stride = 4; }, "the batch stride of b");
  refuses([](Symmetric& s, Choice&) { s.out = nullptr; }, "out must be an address");
  refuses([](Symmetric& s, Choice&) { s.scale = reinterpret_cast<const float*>(2); }, "scale");
  refuses([](Symmetric&, Choice& c) { c.kernel = "fast"; }, "choice.kernel");
  refuses([](Symmetric&, Choice& c) { c.splits = 9; }, "choice.splits");
  refuses([](Symmetric&, Choice& c) { c.splits = 2; }, "workspace");
  Symmetric empty;
  symmetric(empty, {"symmetric80_64", 1}, nullptr, nullptr, 0, stream_);  // nothing to do
  EXPECT_EQ(synchronise(), 0);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
