#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda {

// Products of matrices of 16-bit entries. Nothing here allocates or waits, so a stream may be
// captured after `prepare` (library.h). Thread-safe.

/// Matrices of a batch: entry (z, i, j) is data[z * batch_stride + i * row_stride + j]. `data` is
/// aligned to 16 bytes; strides are multiples of 8 entries, and row_stride covers a row.
/// Padding between rows is neither read nor written.
struct Matrices {
  const void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t batch_stride = 0;

  bool operator==(const Matrices&) const = default;
};

/// out <- alpha scale a b' + beta c + diagonal I. The tensor cores add in fp32; bits depend on the
/// choice, but neither on the batch nor on what else runs. Scaling and adding round to fp32, then
/// the result is rounded once.
///
/// A symmetric product has an a b' that is symmetric in exact arithmetic, and a symmetric c. The
/// kernel computes entries on and below the diagonal and mirrors them: out is symmetric bit by bit,
/// and c's entries above the diagonal do not matter.
///
/// A full product may move weights instead of writing out: see MovedWeights in parameters.h. Then
/// it reads and writes them, 8 bytes an element.
///
///     const ProductChoice choice = candidates(product, device).front();
///     // workspace_bytes(...) bytes, num_tickets(...) zeros
///     compute(product, choice, workspace, tickets, device, stream);
struct Product {
  bool symmetric = true;
  std::int64_t batch = 1;
  std::int64_t m = 0;
  std::int64_t n = 0;  ///< of a full product; a symmetric one has m
  std::int64_t inner = 0;
  Half format = Half::kFp16;  ///< of a, b, c and out
  double alpha = 1;
  Matrices a{};  ///< [m, inner]
  Matrices b{};  ///< [n, inner]; if it is a, symmetric tiles on the diagonal read a once
  /// An operand lies transposed in memory, [inner, m] or [inner, n]: of a full product b alone, of
  /// a symmetric one both or none. Where `candidates` finds none, it cannot be.
  bool a_transposed = false;
  bool b_transposed = false;
  double beta = 0;
  Matrices c{};         ///< [m, n]; with beta = 0 not read, and may be null
  double diagonal = 0;  ///< of a symmetric product
  void* out = nullptr;  ///< [m, n], as Matrices; overlaps none of the others
  std::int64_t out_row_stride = 0;
  std::int64_t out_batch_stride = 0;
  const float* scale = nullptr;  ///< [batch] on the device; null: 1
  MovedWeights weights{};        ///< if w is not null: instead of out. `in_fours` is not read

  std::int64_t cols() const { return symmetric ? m : n; }
};

/// How a product is computed. Each choice has results of its own.
struct ProductChoice {
  std::string kernel;  ///< without the format
  /// 1: a tile's sums are computed in one place. product80: else in so many parts, by different
  /// blocks. product90: the tiles that fill no round of all clusters are cut into so many runs of
  /// near-equal length, each for one cluster.
  int splits = 1;

  bool operator==(const ProductChoice&) const = default;
};

/// Returns the choices that are worth trying on the device. The first one takes the least time by
/// an estimate.
/// @throws InvalidArgument if a size is out of range.
/// @throws CudaError if the device does not answer.
std::vector<ProductChoice> candidates(const Product& product, int device);

/// False if the choice's kernel does not read the operands as they lie, or computes no such
/// product.
/// @throws InvalidArgument if there is no such choice.
bool computes(const ProductChoice& choice, const Product& product);

/// Returns the bytes of scratch memory that a choice needs, on the device; 0 with one split.
/// @throws InvalidArgument if there is no such choice.
std::int64_t workspace_bytes(const Product& product, const ProductChoice& choice, int device);

/// Returns how many zeros in `tickets` a choice needs, on the device; 0 with one split. They are
/// zeros again after the kernel, so products of one stream can share them, of any shapes.
/// @throws InvalidArgument if there is no such choice.
std::int64_t num_tickets(const Product& product, const ProductChoice& choice, int device);

/// Adds a kernel to the stream. `workspace` is aligned to 16 bytes; it and `tickets` may be null
/// with one split.
/// @throws InvalidArgument if there is no such choice, or none for such a product; if a size is
///         negative, m or n exceeds 2^20, inner 2^30 or the batch 65535; if an address is null or
///         not aligned, or a stride does not fit.
/// @throws CudaError from `launch`.
void compute(const Product& product, const ProductChoice& choice, void* workspace,
             std::uint32_t* tickets, int device, void* stream);

}  // namespace dmuon::kernels::cuda
