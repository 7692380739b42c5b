#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "dmuon/kernels/cuda/product.h"

// One product by a kernel of kernels/cuda, for products/cuda.cpp.
namespace dmuon::newton_schulz::cuda {

/// The kinds of products that kernels compute.
enum class Kind { kSymmetric, kFull };

/// beta c + alpha a b, as Products describes it; a b has c's sizes where beta is not 0.
struct Operands {
  double beta;
  const at::Tensor& c;
  double alpha;
  const at::Tensor& a;
  const at::Tensor& b;
};

/// Describes a product without its result. Returns nothing for dtypes and strides that the kernels
/// lack.
std::optional<kernels::cuda::Product> described(Kind kind, const Operands& operands);

/// Sets the result. Returns false, and does nothing, for dtypes and strides that the kernels lack.
bool write_to(kernels::cuda::Product& product, const at::Tensor& out, const Operands& operands);

/// Adds a kernel to the current stream: the one that takes the least time by its estimate, for a
/// matrix of this size alone, so that bits do not depend on the batch.
/// @return  False if no kernel computes such products: then it has done nothing.
bool compute(const kernels::cuda::Product& product, const at::Tensor& like);

/// Adds this kernel to the current stream, with scratch memory. The tensor `like` is on its device.
void compute_by(const kernels::cuda::ProductChoice& choice, const kernels::cuda::Product& product,
                const at::Tensor& like);

}  // namespace dmuon::newton_schulz::cuda
