#pragma once

#include "dmuon/newton_schulz/backend.h"

namespace dmuon::newton_schulz {

/// Whether the machine multiplies bf16: AVX512-BF16, AMX, or Arm's BF16 extension. Elsewhere torch
/// emulates it, slower than fp32.
bool multiplies_bf16();

/// Whether the products of kernels/ multiply this dtype on this machine (backends/avx512.cpp).
bool kernels_multiply(at::ScalarType dtype);

/// cpu_backend(), and the base of others that differ in their products.
class CpuBackend : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  at::ScalarType default_dtype() const override;
  at::ScalarType gram_dtype(at::ScalarType dtype) const override;
  std::vector<std::int64_t> panel_rows(std::int64_t m, at::ScalarType dtype) const override;
  flops::SymmetricCost symmetric_cost(std::int64_t m, at::ScalarType dtype) const override;
  bool batched(std::int64_t short_side, at::ScalarType dtype) const override;
  std::int64_t at_once(std::int64_t rows, std::int64_t cols, std::int64_t count,
                       at::ScalarType dtype) const override;
  at::Tensor normalise(const at::Tensor& x, at::ScalarType dtype, double eps) const override;
  void product(const at::Tensor& out, double beta, const at::Tensor& c, double alpha,
               const at::Tensor& a, const at::Tensor& b) const override;
  Start start(const Update& update, at::ScalarType dtype, double eps) const override;
  at::Tensor take_momentum(const Update& update) const override;
  void move_weights(const Update& update, const at::Tensor& direction) const override;

 protected:
  /// All of it, whatever the panels: results are symmetric bit by bit.
  void mirror(const at::Tensor& out, std::int64_t num_panels) const override;
};

}  // namespace dmuon::newton_schulz
