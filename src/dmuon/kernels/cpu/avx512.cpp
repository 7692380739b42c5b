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
// panels of 16 vectors (avx512_pack.h), but rows that tiles can read where they are. A tile has 8
// rows and up to 48 columns, and keeps its sums in 24 registers (avx512_tile.h). For each word it
// loads 3 registers of b and broadcasts 8 words of a: one load for two multiplications.
namespace dmuon::kernels::cpu {
namespace avx512 {
namespace {

// A unit is one thread's piece of work: tiles that cover kUnitRows rows and kUnitCols columns. A
// unit goes through kMostWords words at a time. Then the second-level cache holds the words of its
// rows, 370 KB; the words of its columns, 740 KB, come from further away.
constexpr std::int64_t kUnitRows = 240;
constexpr std::int64_t kUnitCols = 480;
constexpr std::int64_t kMostWords = 384;
// Smaller units are as fast if all operands are in near caches. They are also used if there are too
// few large units for the threads, which take one unit after the other.
constexpr std::int64_t kSmallUnitRows = 96;
constexpr std::int64_t kSmallUnitCols = 192;
constexpr std::int64_t kMostSmallWords = 1 << 19;
constexpr std::int64_t kLeastUnitsOfThread = 4;

static_assert(kTile == kLanes);
// Sums then begin at the same words in every unit.
static_assert(kMostWords % Fp32::kSumWords == 0 && kMostWords % Bf16::kSumWords == 0);

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

// Rows of a: packed, or where the caller has them. Distances are in bytes.
struct Rows {
  const std::byte* data;
  std::int64_t row;    // between a row and the next one of 16
  std::int64_t rows;   // between 16 rows and the next
  std::int64_t word;   // between a word of a row and the next
  std::int64_t words;  // of a row

  const std::byte* at(std::int64_t top, std::int64_t first) const {
    return data + top / kLanes * rows + top % kLanes * row + first * word;
  }
};

Rows packed(const Panels& panels) {
  constexpr std::int64_t kWord = sizeof(std::uint32_t);
  return {reinterpret_cast<const std::byte*>(panels.data), kWord, panels.words * kLanes * kWord,
          kLanes * kWord, panels.words};
}

// True if tiles can read the rows of a in place: each tile's rows exist, and are whole words. In a
// symmetric product of 384 x 384 in fp32 this saves an eighth of the time.
template <typename T>
bool readable_in_place(const Product& product) {
  return product.a.col_stride == 1 && product.rows % kTileRows == 0 &&
         product.inner * T::kSize % 4 == 0;
}

template <typename T>
Rows in_place(const Product& product, std::int64_t words) {
  const std::int64_t row = product.a.row_stride * T::kSize;
  return {static_cast<const std::byte*>(product.a.data), row, kLanes * row, sizeof(std::uint32_t),
          words};
}

template <typename T, End kEnd>
void compute_unit(const Product& product, const WideEnd* wide, const Unit& unit, const Rows& a,
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
  std::int64_t word = 0;
  do {
    const std::int64_t words = std::min(kMostWords, a.words - word);
    for (std::int64_t left = unit.left; left < unit.right; left += kTileCols) {
      const std::int64_t start = product.symmetric ? std::max(unit.top, left) : unit.top;
      for (std::int64_t top = start; top < unit.bottom; top += kTileRows) {
        compute_tile<T, kEnd>(
            {.a = a.at(top, word),
             .a_row = a.row,
             .a_word = a.word,
             .b = b.at(left, word),
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
  const bool packs_a = !is_one && !readable_in_place<T>(product);
  const std::int64_t words = divided_up(product.inner * T::kSize, 4);
  const std::int64_t words_of_b = divided_up(product.cols, kLanes) * kLanes * words;
  const std::int64_t words_of_a = packs_a ? divided_up(product.rows, kLanes) * kLanes * words : 0;
  thread_local Scratch scratch;
  const Scratch::Use use(scratch);
  const Panels b{scratch.words(words_of_b + words_of_a), words};
  pack<T>(vectors(of_b.data, product.cols, of_b.col_stride, of_b.row_stride), product.inner, b,
          workers);
  const Panels panels_of_a{is_one ? b.data : b.data + words_of_b, words};
  if (packs_a) {
    pack<T>(vectors(of_a.data, product.rows, of_a.row_stride, of_a.col_stride), product.inner,
            panels_of_a, workers);
  }
  const Rows a = packs_a || is_one ? packed(panels_of_a) : in_place<T>(product, words);
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
