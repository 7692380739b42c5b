#pragma once

#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {

/// True if the machine multiplies bf16: AVX512-BF16, AMX, or Arm's BF16 extension. Elsewhere torch
/// emulates bf16, more slowly than fp32.
bool multiplies_bf16();

/// True if the machine multiplies bf16, and is not known to have a lower rate there than in fp32.
bool prefers_bf16();

/// True if kernels/cpu multiplies this dtype on this machine (products/avx512.cpp).
bool kernels_multiply(at::ScalarType dtype);

/// cpu_products(), and the base of other products on CPUs.
class CpuProducts : public Products {
 public:
  std::string_view name() const override { return "cpu"; }
  at::ScalarType gram_dtype(at::ScalarType dtype) const override;
  std::vector<std::int64_t> panel_rows(std::int64_t m, at::ScalarType dtype) const override;
  flops::SymmetricCost symmetric_cost(std::int64_t m, at::ScalarType dtype) const override;
  bool batched(std::int64_t short_side, at::ScalarType dtype) const override;
  std::int64_t at_once(std::int64_t rows, std::int64_t cols, std::int64_t count,
                       at::ScalarType dtype) const override;
  void product(const at::Tensor& out, double beta, const at::Tensor& c, double alpha,
               const at::Tensor& a, const at::Tensor& b) const override;

 protected:
  /// Mirrors the whole triangle, whatever the panels: results are symmetric bit by bit.
  void mirror(const at::Tensor& out, std::int64_t num_panels) const override;
};

}  // namespace dmuon::newton_schulz
