#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "dmuon/kernels/cpu/products.h"
#include "dmuon/newton_schulz/cpu_threads.h"
#include "dmuon/newton_schulz/products.h"
#include "dmuon/newton_schulz/products/cpu.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

class WithThreads {
 public:
  explicit WithThreads(int threads) { at::set_num_threads(threads); }
  ~WithThreads() { at::set_num_threads(before_); }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;

 private:
  int before_ = at::get_num_threads();
};

std::vector<at::ScalarType> dtypes_of_kernels() {
  std::vector<at::ScalarType> dtypes;
  if (kernels::cpu::multiplies(kernels::cpu::Dtype::kFloat)) dtypes.push_back(at::kFloat);
  if (kernels::cpu::multiplies(kernels::cpu::Dtype::kBFloat16)) dtypes.push_back(at::kBFloat16);
  return dtypes;
}

TEST(CpuThreads, AreAsManyAsPyTorchsAndEachPlaceIsDoneOnce) {
  const WithThreads two(2);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::vector<int> times(1000);
  cpu::on_threads(1000, [&](std::int64_t begin, std::int64_t end) {
    const std::scoped_lock lock(mutex);
    seen.insert(std::this_thread::get_id());
    for (std::int64_t i = begin; i < end; ++i) ++times[static_cast<std::size_t>(i)];
  });
  EXPECT_EQ(seen.size(), 2);
  EXPECT_EQ(times, std::vector<int>(1000, 1));
}

TEST(CpuThreads, AreOneInsideOfATaskAndWhereThereIsOne) {
  const auto ranges_of = [](std::int64_t count) {
    std::mutex mutex;
    int ranges = 0;
    cpu::on_threads(count, [&](std::int64_t, std::int64_t) {
      const std::scoped_lock lock(mutex);
      ++ranges;
    });
    return ranges;
  };
  EXPECT_EQ(ranges_of(0), 0);
  {
    const WithThreads one(1);
    EXPECT_EQ(ranges_of(8), 1);
  }
  const WithThreads two(2);
  std::mutex mutex;
  std::vector<int> inside;
  cpu::on_threads(2, [&](std::int64_t, std::int64_t) {
    const int ranges = ranges_of(8);
    const std::scoped_lock lock(mutex);
    inside.push_back(ranges);
  });
  EXPECT_EQ(inside, (std::vector<int>{1, 1}));
}

// A matrix alone, in batches of fewer and of more matrices than threads, and on one thread.
TEST(Avx512Products, GivesAMatrixTheSameBitsOnAnyThreadsAndInAnyBatch) {
  for (const at::ScalarType dtype : dtypes_of_kernels()) {
    const Tensor x = at::randn({5, 200, 331}, dtype);
    const auto symmetric = [&](const Tensor& some) {
      const Tensor r = at::empty({some.size(0), 200, 200}, dtype);
      avx512_products().symmetric_product(r, 0, r, 1, some, some.mT(), kernels::cpu::kTile);
      const Tensor y = at::empty_like(some);
      avx512_products().product(y, 0.5, some, 1, r, some);
      return std::pair{r, y};
    };
    const WithThreads one(1);
    const auto [r, y] = symmetric(x);
    EXPECT_TRUE(at::equal(r, r.mT()));
    const WithThreads three(3);
    for (const auto& [first, count] : {std::pair{0, 5}, {1, 2}, {4, 1}}) {
      const auto [part_r, part_y] = symmetric(x.narrow(0, first, count));
      EXPECT_TRUE(at::equal(part_r, r.narrow(0, first, count))) << dtype << " " << count;
      EXPECT_TRUE(at::equal(part_y, y.narrow(0, first, count))) << dtype << " " << count;
    }
  }
}

WideSquare square_of(std::int64_t count, std::int64_t m) {
  return {at::empty({count, m, m}, at::kFloat), at::empty({count, m}, at::kFloat),
          at::empty({count, m, m}, at::kBFloat16)};
}

WideSquare part_of(const WideSquare& x, std::int64_t first, std::int64_t count) {
  return {x.wide.narrow(0, first, count), x.diagonal.narrow(0, first, count),
          x.narrow.narrow(0, first, count)};
}

Tensor whole(const WideSquare& x) {
  return x.wide.tril().add(x.wide.tril(-1).mT()).to(at::kDouble);
}

// Of matrices in a batch, also of columns that lie side by side.
TEST(Avx512Products, KeepsWideSquaresInFp32) {
  const Products& products = avx512_products();
  if (!kernels::cpu::multiplies(kernels::cpu::Dtype::kBFloat16)) {
    EXPECT_FALSE(products.has_wide_squares(at::kBFloat16));
    GTEST_SKIP() << "this machine lacks the instructions";
  }
  EXPECT_FALSE(products.has_wide_squares(at::kFloat));
  const Tensor x = at::randn({3, 51, 200}, at::kDouble).mul(0.05).to(at::kBFloat16);
  const WideSquare r = square_of(3, 51);
  const WideSquare z = square_of(3, 51);
  products.wide_gram(r, 0.5, x);
  products.wide_product(z, 2, r, 0.25, r, r);
  const Tensor wide = x.to(at::kDouble);
  const Tensor exact = wide.matmul(wide.mT()).mul(0.5);
  const auto off = [](const Tensor& got, const Tensor& should) {
    return got.sub(should).norm().item<double>() / should.norm().item<double>();
  };
  EXPECT_LE(off(whole(r), exact), 1e-6);
  EXPECT_LE(off(whole(z), exact.mul(2).add(exact.matmul(exact), 0.25)), 5e-4);
  EXPECT_TRUE(at::equal(z.narrow, z.narrow.mT()));
  EXPECT_TRUE(at::equal(z.diagonal, z.wide.diagonal(0, -2, -1)));
  const WideSquare alone = square_of(1, 51);
  products.wide_gram(alone, 0.5, x.mT().contiguous().mT().narrow(0, 1, 1));
  EXPECT_TRUE(at::equal(alone.narrow, part_of(r, 1, 1).narrow));
  products.wide_product(alone, 2, part_of(r, 1, 1), 0.25, part_of(r, 1, 1), part_of(r, 1, 1));
  EXPECT_TRUE(at::equal(alone.narrow, part_of(z, 1, 1).narrow));
}

// Operands, addend and result whose entries do not lie side by side along any dimension.
TEST(Avx512Products, TakesTensorsOfAnyStrides) {
  for (const at::ScalarType dtype : dtypes_of_kernels()) {
    const auto spread = [&](const Tensor& x) {
      const Tensor wide = at::full({x.size(0), x.size(1), 3, x.size(2), 2}, 7, x.options());
      Tensor part = wide.select(4, 1).select(2, 1);
      return part.copy_(x);
    };
    const Tensor a = at::randn({2, 17, 40}, dtype);
    const Tensor b = at::randn({2, 40, 23}, dtype);
    const Tensor c = at::randn({2, 17, 23}, dtype);
    const Tensor plain = at::empty_like(c);
    avx512_products().product(plain, 0.5, c, 2, a, b);
    const Tensor got = at::empty_like(c);
    avx512_products().product(got, 0.5, spread(c), 2, spread(a), spread(b));
    EXPECT_TRUE(at::equal(got, plain)) << dtype;
    const Tensor apart = spread(c);  // computed by PyTorch's BLAS, which rounds otherwise
    avx512_products().product(apart, 0.5, c, 2, a, b);
    EXPECT_LE(apart.sub(plain).norm().item<double>(), 1e-2 * plain.norm().item<double>()) << dtype;
  }
}

TEST(Avx512Products, CountsTheTilesOfASymmetricProductAndWeighsFp32) {
  const double fp32_cost = prefers_bf16() ? 2.05 : 0.55;
  for (const at::ScalarType dtype : dtypes_of_kernels()) {
    const auto cost = avx512_products().symmetric_cost(64, dtype);
    EXPECT_EQ(cost.share, (1 + 2 + 3 + 4) / 16.0);
    EXPECT_EQ(cost.gram_dtype, dtype == at::kBFloat16 ? fp32_cost : 1);
    EXPECT_EQ(avx512_products().panel_rows(64, dtype), std::vector<std::int64_t>{16});
  }
}

}  // namespace
}  // namespace dmuon::newton_schulz
