#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace dmuon::kernels::cpu {

// Products of matrices on CPUs whose AVX-512 instructions multiply the dtype. BLAS lacks three of
// them: the lower triangle of a symmetric product, both addends in one pass, and bf16 products of
// symmetric matrices that stay in fp32. On other machines nothing here runs; see `multiplies`.

enum class Dtype { kFloat, kBFloat16 };

/// True if this machine has the instructions; AVX512-BF16 for kBFloat16.
bool multiplies(Dtype dtype);

/// Entry (i, j) of a matrix is data[i * row_stride + j * col_stride], in elements; one of the
/// strides is 1.
struct Operand {
  const void* data;
  std::int64_t row_stride;
  std::int64_t col_stride;

  bool operator==(const Operand&) const = default;
};

/// out <- beta C + alpha a b, where C is c or c scaled. a is [rows, inner] and b is [inner, cols];
/// each size is at least 0. Rows of c and out lie c_stride and out_stride elements apart; entries
/// of a row lie side by side. out does not overlap a or b, but may be c, in the same strides. With
/// beta = 0, c is not read and may be null.
struct Product {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t inner = 0;
  double alpha = 1;
  Operand a{};
  Operand b{};
  double beta = 0;
  const void* c = nullptr;
  std::int64_t c_stride = 0;
  void* out = nullptr;
  std::int64_t out_stride = 0;
  /// True if rows == cols, c is symmetric, and a b is symmetric in exact arithmetic. Then the lower
  /// triangle is computed, in tiles of kTile columns, and mirrored: out is symmetric bit by bit.
  bool symmetric = false;
  /// If set: out <- decay out + beta c + alpha a b. out is then fp32 for any dtype, and does not
  /// overlap c. Unset in symmetric products.
  std::optional<double> decay = {};
  /// Factors of c's rows or columns. At most one of the two is set; none in symmetric products.
  const float* row_factors = nullptr;
  const float* col_factors = nullptr;
};

inline constexpr std::int64_t kTile = 16;

using OnRange = std::function<void(std::int64_t begin, std::int64_t end)>;

/// A symmetric m x m matrix in fp32, and without its diagonal in bf16, to which products add the
/// diagonal's contribution in fp32 (newton_schulz::WideSquare).
struct WideSquare {
  float* wide;      ///< [m, m]; entries above the diagonal are undefined
  float* diagonal;  ///< [m], equal to wide's diagonal
  void* narrow;     ///< [m, m] bf16, symmetric bit by bit; zeros on the diagonal
};

/// out <- alpha a a', where a is [m, inner] in bf16.
struct WideGram {
  std::int64_t m = 0;
  std::int64_t inner = 0;
  double alpha = 1;
  Operand a{};
  WideSquare out{};
};

/// out <- beta c + alpha a b, where a and b commute in exact arithmetic. Rounding affects only the
/// products of entries of a and b that both lie off the diagonal. c may be out's; out overlaps
/// neither a nor b.
struct WideProduct {
  std::int64_t m = 0;
  double alpha = 1;
  WideSquare a{};
  WideSquare b{};
  double beta = 0;
  const float* c = nullptr;  ///< `wide` of a WideSquare; with beta = 0 not read
  WideSquare out{};
};

/// Threads that compute. `run` calls its argument on disjoint ranges that make up [0, count), on
/// any threads, and returns when all are done.
struct Workers {
  std::int64_t num_threads;  ///< at least 1; work is divided by it, and bits do not depend on it
  std::function<void(std::int64_t count, const OnRange&)> run;
};

/// Computes a product. Sums are in fp32. The order of an entry's sum depends on `inner` alone, so
/// bits depend neither on threads nor on addresses. Scaling and adding round to fp32; the result is
/// rounded to the dtype. bf16 products treat subnormal numbers as zero. Thread-safe.
///
/// Writes b once more, packed, and a unless it is b's transpose or tiles can read its rows in
/// place: at most 2 (rows + cols) inner elements of traffic, beside 2 rows cols inner FLOPs. The
/// calling thread keeps this memory for the next product, up to 64 MB a dtype. Each worker keeps
/// 460 KB.
///
/// @throws InternalError if multiplies(dtype) is false, if a symmetric product has a decay or
///                       factors, or if a product has both factors.
void multiply(const Product& product, Dtype dtype, const Workers& workers);

/// The same in bf16; the fp32 parts of the result are not rounded further. Beside packing these
/// read up to three more triangles in fp32, and write one.
void multiply(const WideGram& product, const Workers& workers);
void multiply(const WideProduct& product, const Workers& workers);

}  // namespace dmuon::kernels::cpu
