#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cpu/avx512_pack.h"
#include "dmuon/kernels/cpu/avx512_registers.h"
#include "dmuon/kernels/cpu/avx512_tile.h"
#include "dmuon/kernels/cpu/products.h"

// The algorithm. Rows of a, and columns of b, are vectors of `inner` entries. They are packed into
// panels of 16 vectors (avx512_pack.h). A tile has 8 rows and up to 48 columns, and keeps its sums
// in 24 registers (avx512_tile.h). For each word it loads 3 registers of b and broadcasts 8 words
// of a: one load for two multiplications.
namespace dmuon::kernels::cpu {
namespace avx512 {
namespace {

// A unit is one thread's piece of work: tiles that cover kUnitRows rows and kUnitCols columns. A
// unit goes through kMostWords words at a time. Then the second-level cache holds the words of its
// rows, 370 KB; the words of its columns, 740 KB, come from further away.
constexpr std::int64_t kUnitRows = 240;
constexpr std::int64_t kUnitCols = 480;
constexpr std::int64_t kMostWords = 384;
// In fp32 the sums of this many words are added up apart: errors grow with longer sums.
constexpr std::int64_t kMostFp32Words = 128;
// Smaller units are as fast if all operands are in near caches. They are also used if there are too
// few large units for the threads, which take one unit after the other.
constexpr std::int64_t kSmallUnitRows = 96;
constexpr std::int64_t kSmallUnitCols = 192;
constexpr std::int64_t kMostSmallWords = 1 << 19;
constexpr std::int64_t kLeastUnitsOfThread = 4;

static_assert(kTile == kLanes);

// Rows [top, bottom) of the columns [left, right).
struct Unit {
  std::int64_t top;
  std::int64_t bottom;
  std::int64_t left;
  std::int64_t right;
};

std::vector<Unit> units_of_size(const Product& product, std::int64_t rows, std::int64_t cols) {
  std::vector<Unit> units;
  for (std::int64_t left = 0; left < product.cols; left += cols) {
    for (std::int64_t top = product.symmetric ? left : 0; top < product.rows; top += rows) {
      units.push_back(
          {top, std::min(top + rows, product.rows), left, std::min(left + cols, product.cols)});
    }
  }
  return units;
}

std::vector<Unit> units_of(const Product& product, std::int64_t words, std::int64_t num_threads) {
  if ((product.rows + product.cols) * words > kMostSmallWords) {
    std::vector<Unit> units = units_of_size(product, kUnitRows, kUnitCols);
    const auto count = static_cast<std::int64_t>(units.size());
    if (num_threads == 1 || count >= kLeastUnitsOfThread * num_threads) return units;
  }
  return units_of_size(product, kSmallUnitRows, kSmallUnitCols);
}

// The end of the columns of a unit that are computed in the rows from `top`.
std::int64_t right_of(const Product& product, const Unit& unit, std::int64_t top) {
  return product.symmetric ? std::min(unit.right, (top / kLanes + 1) * kLanes) : unit.right;
}

template <typename T, End kEnd>
void compute_unit(const Product& product, const WideEnd* wide, const Unit& unit, const Panels& a,
                  const Panels& b) {
  const auto* c = static_cast<const std::byte*>(product.c);
  auto* out = static_cast<std::byte*>(product.out);
  const std::int64_t c_stride = product.c_stride * T::kSize;
  const std::int64_t out_size = kEnd == End::kAdded ? Fp32::kSize : T::kSize;
  const std::int64_t out_stride = product.out_stride * out_size;
  const auto from = [](const float* factors, std::int64_t at) {
    return factors == nullptr ? nullptr : factors + at;
  };
  thread_local Scratch scratch;
  auto* sums = reinterpret_cast<float*>(scratch.words(kUnitRows * kUnitCols));
  const std::int64_t most = T::kSize == 4 ? kMostFp32Words : kMostWords;
  std::int64_t word = 0;
  do {
    const std::int64_t words = std::min(most, a.words - word);
    for (std::int64_t left = unit.left; left < unit.right; left += kTileCols) {
      const std::int64_t start = product.symmetric ? std::max(unit.top, left) : unit.top;
      for (std::int64_t top = start; top < unit.bottom; top += kTileRows) {
        compute_tile<T, kEnd>(
            {.a = a.at(top) + word * kLanes,
             .b = b.at(left) + word * kLanes,
             .panel = b.words * kLanes,
             .words = words,
             .is_first = word == 0,
             .is_last = word + words == a.words,
             .sums = sums + (top - unit.top) * kTileCols + (left - unit.left) * kUnitRows,
             .c = c == nullptr ? nullptr : c + top * c_stride + left * T::kSize,
             .c_stride = c_stride,
             .row_factors = from(product.row_factors, top),
             .col_factors = from(product.col_factors, left),
             .out = out + top * out_stride + left * out_size,
             .out_stride = out_stride,
             .rows = unit.bottom - top,
             .cols = std::min(left + kTileCols, right_of(product, unit, top)) - left,
             .decay = static_cast<float>(product.decay.value_or(0)),
             .wide = wide,
             .top = top,
             .left = left},
            static_cast<float>(product.alpha), static_cast<float>(product.beta));
      }
    }
    word += words;
  } while (word < a.words);
  if (!product.symmetric) return;
  for (std::int64_t top = unit.top; top < unit.bottom; top += kLanes)
    for (std::int64_t left = unit.left; left < right_of(product, unit, top); left += kLanes)
      mirror<T>(out, out_stride, product.rows, top, left);
}

template <typename T, End kEnd>
void multiply_as(const Product& product, const Workers& workers, const WideEnd* wide = nullptr) {
  const auto vectors = [](const void* data, std::int64_t count, std::int64_t stride,
                          std::int64_t step) {
    return Vectors{static_cast<const std::byte*>(data), count, stride * T::kSize, step * T::kSize};
  };
  const auto& [of_a, of_b] = std::tie(product.a, product.b);
  const bool is_one =
      of_a == Operand{of_b.data, of_b.col_stride, of_b.row_stride} && product.rows == product.cols;
  const std::int64_t words = divided_up(product.inner * T::kSize, 4);
  const std::int64_t words_of_a = divided_up(product.rows, kLanes) * kLanes * words;
  const std::int64_t words_of_b = is_one ? 0 : divided_up(product.cols, kLanes) * kLanes * words;
  thread_local Scratch scratch;
  const Scratch::Use use(scratch);
  const Panels a{scratch.words(words_of_a + words_of_b), words};
  const Panels b{is_one ? a.data : a.data + words_of_a, words};
  pack<T>(vectors(of_a.data, product.rows, of_a.row_stride, of_a.col_stride), product.inner, a,
          workers);
  if (!is_one) {
    pack<T>(vectors(of_b.data, product.cols, of_b.col_stride, of_b.row_stride), product.inner, b,
            workers);
  }
  const std::vector<Unit> units = units_of(product, words, workers.num_threads);
  const auto count = static_cast<std::int64_t>(units.size());
  std::atomic<std::int64_t> next = 0;  // units are unequal
  workers.run(std::min(count, workers.num_threads), [&](std::int64_t, std::int64_t) {
    for (std::int64_t i = next++; i < count; i = next++)
      compute_unit<T, kEnd>(product, wide, units[static_cast<std::size_t>(i)], a, b);
  });
}

template <typename T>
void multiply_plain(const Product& product, const Workers& workers) {
  if (product.decay) {
    multiply_as<T, End::kAdded>(product, workers);
  } else {
    multiply_as<T, End::kStored>(product, workers);
  }
}

void multiply_wide(const Product& product, const WideEnd& wide, const Workers& workers) {
  core::invariant(multiplies(Dtype::kBFloat16), "multiply: this processor does not multiply bf16");
  multiply_as<Bf16, End::kWide>(product, workers, &wide);
}

}  // namespace
}  // namespace avx512

bool multiplies(Dtype dtype) {
  const bool has_registers =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  return has_registers && (dtype == Dtype::kFloat || __builtin_cpu_supports("avx512bf16") != 0);
}

void multiply(const Product& product, Dtype dtype, const Workers& workers) {
  core::invariant(multiplies(dtype), "multiply: this processor does not multiply the dtype");
  const int num_factors = (product.row_factors != nullptr) + (product.col_factors != nullptr);
  core::invariant(num_factors <= 1, "multiply: factors of rows and of columns exclude each other");
  core::invariant(!product.symmetric || (!product.decay && num_factors == 0),
                  "multiply: decay and factors must be unset in a symmetric product");
  if (dtype == Dtype::kFloat) {
    avx512::multiply_plain<avx512::Fp32>(product, workers);
  } else {
    avx512::multiply_plain<avx512::Bf16>(product, workers);
  }
}

void multiply(const WideGram& product, const Workers& workers) {
  const auto& [m, inner, alpha, a, out] = product;
  const Product of_narrow{.rows = m,
                          .cols = m,
                          .inner = inner,
                          .alpha = alpha,
                          .a = a,
                          .b = {a.data, a.col_stride, a.row_stride},
                          .out = out.narrow,
                          .out_stride = m,
                          .symmetric = true};
  avx512::multiply_wide(of_narrow, {m, {}, {}, nullptr, out}, workers);
}

void multiply(const WideProduct& product, const Workers& workers) {
  const auto& [m, alpha, a, b, beta, c, out] = product;
  // b is symmetric, and is read as its transpose: a square times itself is packed once.
  const Product of_narrow{.rows = m,
                          .cols = m,
                          .inner = m,
                          .alpha = alpha,
                          .a = {a.narrow, m, 1},
                          .b = {b.narrow, 1, m},
                          .beta = beta,
                          .out = out.narrow,
                          .out_stride = m,
                          .symmetric = true};
  avx512::multiply_wide(of_narrow, {m, a, b, c, out}, workers);
}

}  // namespace dmuon::kernels::cpu
