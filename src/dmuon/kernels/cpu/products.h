#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace dmuon::kernels::cpu {

// Products of matrices on CPUs whose AVX-512 instructions multiply their dtype, and what BLAS has
// no function for: of a symmetric product the lower triangle alone, both addends in one pass, and
// bf16 products of symmetric matrices that stay in fp32. On other machines `multiplies` says that
// nothing here runs.

enum class Dtype { kFloat, kBFloat16 };

/// Whether this machine has the instructions; AVX512-BF16 for kBFloat16.
bool multiplies(Dtype dtype);

/// Entry (i, j) of a matrix is data[i * row_stride + j * col_stride], in elements; one of the
/// strides is 1.
struct Operand {
  const void* data;
  std::int64_t row_stride;
  std::int64_t col_stride;

  bool operator==(const Operand&) const = default;
};

/// out <- beta C + alpha a b, where C is c or c scaled, a is [rows, inner] and b [inner, cols],
/// each at least 0. Rows of c and out lie c_stride and out_stride elements apart, and their entries
/// side by side. out does not overlap a or b, but may be c, in the same strides. With beta = 0, c
/// is not read and may be null.
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
  /// rows == cols, c is symmetric and a b would be: what lies below the diagonal is computed, in
  /// tiles of kTile columns, and mirrored, so that out is symmetric bit by bit.
  bool symmetric = false;
  /// Where it is set, out is added to, out <- decay out + beta c + alpha a b, and is fp32 whatever
  /// the dtype; it does not overlap c. Not for symmetric products.
  std::optional<double> decay = {};
  /// Factors of c's rows or of its columns: at most one is set, and none in symmetric products.
  const float* row_factors = nullptr;
  const float* col_factors = nullptr;
};

inline constexpr std::int64_t kTile = 16;

using OnRange = std::function<void(std::int64_t begin, std::int64_t end)>;

/// A symmetric m x m matrix in fp32, with what bf16 products multiply of it. Of a matrix near a
/// multiple of the identity, rounding costs most on the diagonal: so that is left out, and the
/// products below add in fp32 what it contributes.
struct WideSquare {
  float* wide;      ///< [m, m]; what lies above the diagonal means nothing
  float* diagonal;  ///< [m], the same numbers as on wide's
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

/// out <- beta c + alpha a b, where a and b commute in exact arithmetic. Rounded are only a and b
/// off their diagonals, for the products of what lies there. c may be that of out, which overlaps
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

/// Who computes. `run` calls its argument on disjoint ranges that make up [0, count), on whichever
/// threads, and returns when all are done.
struct Workers {
  std::int64_t num_threads;  ///< at least 1; decides how finely work is divided, and no bit
  std::function<void(std::int64_t count, const OnRange&)> run;
};

/// Computes a product. Sums are taken in fp32, each entry's in an order that depends on `inner`
/// alone, so that bits depend neither on threads nor on where matrices lie; what they are scaled
/// and added to is rounded to fp32, the result to the dtype. bf16 products leave subnormal numbers
/// out. Thread-safe.
///
/// Beside out it writes a and b once more, packed: 2 (rows + cols) inner elements of traffic at
/// most, beside 2 rows cols inner FLOPs. The calling thread keeps that memory for the next product,
/// up to 64 MB a dtype, and each worker 460 KB.
///
/// @throws InternalError where multiplies(dtype) is false, or a symmetric product has a decay or
///                       factors, or another one both factors.
void multiply(const Product& product, Dtype dtype, const Workers& workers);

/// The same in bf16, but that fp32 parts of the result are not rounded further. Beside the packing
/// these read up to three more triangles in fp32, and write one.
void multiply(const WideGram& product, const Workers& workers);
void multiply(const WideProduct& product, const Workers& workers);

}  // namespace dmuon::kernels::cpu
