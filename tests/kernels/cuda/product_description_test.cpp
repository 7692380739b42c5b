#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/product.h"
#include "tests/kernels/cuda/gpu.h"

// Choices and refusals; symmetric_test.cpp has results.
namespace dmuon::kernels::cuda {
namespace {

class SymmetricDescriptionTest : public GpuTest {};

using Choices = std::vector<ProductChoice>;

Choices of_family(const Choices& all, const std::string& family) {
  Choices found;
  std::ranges::copy_if(all, std::back_inserter(found),
                       [&](const ProductChoice& one) { return one.kernel.starts_with(family); });
  return found;
}

bool has(const Choices& choices, const ProductChoice& choice) {
  return std::ranges::find(choices, choice) != choices.end();
}

TEST_F(SymmetricDescriptionTest, OffersSplitsWhereTilesDoNotFillTheDevice) {
  Product product;
  product.m = 512;
  product.inner = 2048;
  const Choices few = of_family(candidates(product, 0), "product80");
  EXPECT_TRUE(has(few, {"product80_64", 1}) && has(few, {"product80_128", 1}));
  EXPECT_TRUE(has(few, {"product80_128", 8}));
  for (const ProductChoice& choice : few) {
    const std::int64_t tiles = choice.kernel == "product80_64" ? 36 : 10;
    const std::int64_t side = choice.kernel == "product80_64" ? 64 : 128;
    const std::int64_t parts = choice.splits == 1 ? 0 : tiles * choice.splits;
    EXPECT_EQ(num_tickets(product, choice, 0), choice.splits == 1 ? 0 : tiles);
    EXPECT_EQ(workspace_bytes(product, choice, 0), parts * side * side * 4);
  }
  product.batch = 100;
  EXPECT_EQ(of_family(candidates(product, 0), "product80").size(), 2U);  // the batch fills it
  product.batch = 1;
  product.inner = 8;
  EXPECT_EQ(of_family(candidates(product, 0), "product80").size(), 2U);  // nothing to split
  product.m = 64;
  product.inner = 1 << 16;
  EXPECT_GT(candidates(product, 0).front().splits, 1);
}

TEST_F(SymmetricDescriptionTest, OffersRunsOfTheTilesThatFillNoRoundOfClusters) {
  if (!has_product90(0)) GTEST_SKIP() << "compute capability 9.0 alone";
  const int clusters = num_multiprocessors(0) / 2;
  ASSERT_GT(clusters, 12);
  Product product;
  product.m = 600;  // 6 tiles of 256 x 256
  product.inner = 4096;
  const Choices six = of_family(candidates(product, 0), "product90");
  EXPECT_TRUE(has(six, {"product90", 1}) && has(six, {"product90", 12}));
  EXPECT_EQ(num_tickets(product, {"product90", 1}, 0), 0);
  EXPECT_EQ(num_tickets(product, {"product90", 12}, 0), 2 * 6);
  EXPECT_EQ(workspace_bytes(product, {"product90", 12}, 0), 2 * 6 * 2 * 128 * 256 * 4);
  // 13 runs touch a tile at most four times: it has 64 steps, and the shortest run 29.
  EXPECT_EQ(workspace_bytes(product, {"product90", 13}, 0), 2 * 6 * 4 * 128 * 256 * 4);
  product.batch = 3;
  EXPECT_EQ(num_tickets(product, {"product90", 12}, 0), 3 * 2 * 6);
  product.a_transposed = product.b_transposed = true;
  EXPECT_EQ(of_family(candidates(product, 0), "product80").size(), 0U);
  product.inner = 0;
  EXPECT_TRUE(candidates(product, 0).empty());
}

TEST_F(SymmetricDescriptionTest, PutsFirstWhatAnH200RanFastest) {
  if (num_multiprocessors(0) != 132 || !has_product90(0)) GTEST_SKIP() << "another device";
  const auto first = [](std::int64_t m, std::int64_t inner) {
    Product product;
    product.m = m;
    product.inner = inner;
    return candidates(product, 0).front();
  };
  EXPECT_EQ(first(1024, 1024), (ProductChoice{"product80_64", 1}));
  EXPECT_EQ(first(2048, 2048), (ProductChoice{"product90", 1}));
  EXPECT_EQ(first(2048, 11008), (ProductChoice{"product90", 66}));
  EXPECT_EQ(first(8192, 8192), (ProductChoice{"product90", 1}));
}

TEST_F(SymmetricDescriptionTest, RefusesBadDescriptions) {
  const OnGpu<std::uint16_t> values(std::vector<std::uint16_t>(1024));
  const auto refuses = [&](auto change, const std::string& words) {
    Product bad;
    bad.m = bad.inner = 16;
    bad.a = bad.b = bad.c = {values.data(), 16, 0};
    bad.beta = 1;
    bad.out = values.data() + 512;
    bad.out_row_stride = 16;
    ProductChoice choice{"product80_64", 1};
    change(bad, choice);
    try {
      compute(bad, choice, nullptr, nullptr, 0, stream_);
      ADD_FAILURE() << "accepts " << words;
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  using Choice = ProductChoice;
  refuses([](Product& s, Choice&) { s.batch = 65536; }, "batch must be in [0, 65535]");
  refuses([](Product& s, Choice&) { s.m = -1; }, "m must be");
  refuses([](Product& s, Choice&) { s.inner = std::int64_t{1} << 31; }, "inner must be");
  refuses([](Product& s, Choice&) { s.a.data = nullptr; }, "a must be an address");
  refuses([&](Product& s, Choice&) { s.b.data = values.data() + 1; }, "b must be an address");
  refuses([](Product& s, Choice&) { s.a.row_stride = 8; }, "the row stride of a");
  refuses([](Product& s, Choice&) { s.c.row_stride = 17; }, "the row stride of c");
  refuses([](Product& s, Choice&) { s.b.batch_stride = 4; }, "the batch stride of b");
  refuses([](Product& s, Choice&) { s.out = nullptr; }, "out must be an address");
  refuses([](Product& s, Choice&) { s.scale = reinterpret_cast<const float*>(2); }, "scale");
  refuses([](Product&, Choice& c) { c.kernel = "fast"; }, "choice.kernel");
  refuses([](Product&, Choice& c) { c.splits = 9; }, "choice.splits");
  refuses([](Product&, Choice& c) { c = {"product90", 1025}; }, "choice.splits");
  refuses([](Product& s, Choice&) { s.a_transposed = s.b_transposed = true; },
          "no symmetric product with transposed a and transposed b");
  refuses([](Product&, Choice& c) { c.splits = 2; }, "workspace");
  Product empty;
  compute(empty, {"product80_64", 1}, nullptr, nullptr, 0, stream_);  // nothing to do
  EXPECT_EQ(synchronise(), 0);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
