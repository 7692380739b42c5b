#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <array>
#include <limits>

#include "dmuon/newton_schulz/backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

class AtenBackend final : public Backend {
 public:
  // fp16 has three more significand bits than bf16, and the iteration never leaves its range.
  at::ScalarType default_dtype() const override { return at::kHalf; }

  // Tensor cores multiply 16-bit dtypes ten times faster than fp32, and an R in fp16 meets fp16's
  // error bounds on rectangular matrices.
  at::ScalarType gram_dtype(at::ScalarType dtype) const override { return dtype; }

  // Panels of one result would each fill only a part of an accelerator, so products are full.
  flops::SymmetricCost symmetric_cost(std::int64_t, at::ScalarType) const override { return {}; }

  bool batched(std::int64_t, at::ScalarType) const override { return true; }

  // Divides by the largest entry first: squares of the entries could leave their dtype's range.
  Tensor normalise(const Tensor& x, at::ScalarType dtype) const override {
    const std::array<std::int64_t, 2> matrix{-2, -1};
    const Tensor y = x.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const Tensor largest =
        at::linalg_vector_norm(y, std::numeric_limits<double>::infinity(), matrix, true);
    const Tensor scaled = y.div(largest.masked_fill(largest.eq(0), 1));
    const Tensor norm = at::linalg_vector_norm(scaled, 2, matrix, /*keepdim=*/true);
    return scaled.div(norm.masked_fill(norm.eq(0), 1)).to(dtype).contiguous();
  }

  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    // With out as its own addend ATen accumulates in place, whatever out's strides.
    if (beta != 0 && !out.is_same(c)) out.copy_(c);
    if (a.dim() == 2) {
      out.addmm_(a, b, beta, alpha);
    } else {
      out.baddbmm_(a, b, beta, alpha);
    }
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b) const override {
    product(out, beta, c, alpha, a, b);
    out.copy_(out.tril().add_(out.tril(-1).mT()));
  }
};

}  // namespace

const Backend& aten_backend() {
  static const AtenBackend backend;
  return backend;
}

}  // namespace dmuon::newton_schulz
