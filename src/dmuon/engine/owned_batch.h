#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dmuon::engine {

/// What an owner holds of a batch of equally shaped matrices, contiguous, so that whole-batch
/// operations are one kernel each. Only the owner of a batch has it.
struct OwnedBatch {
  std::vector<int> matrices;  ///< [b] global indices
  at::Tensor master;          ///< [b, rows, cols] fp32 weights
  at::Tensor gradient;        ///< [b, rows, cols] fp32 mean gradient, accumulated over micro-steps
  std::vector<bool> filled;   ///< [b] whether `gradient` holds anything; where not, it is undefined

  OwnedBatch(std::vector<int> matrices, std::int64_t rows, std::int64_t cols, c10::Device device);

  /// gradient[place] (+)= scale * values, from element `begin` on; overwrites where nothing is
  /// held. Who has done so for all elements says so in `filled`.
  /// @param values  [elements], any floating dtype.
  void accumulate(std::size_t place, std::int64_t begin, const at::Tensor& values, double scale);

  /// [b] squared Frobenius norm of each gradient in fp64, 0 where nothing is held.
  std::vector<double> squared_norms() const;

  std::int64_t num_bytes() const;
};

}  // namespace dmuon::engine
