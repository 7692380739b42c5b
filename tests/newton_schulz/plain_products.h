#pragma once

#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {

// A backend that has products alone: each in fp64 by ATen, rounded once. It has wide squares in
// both 16-bit dtypes, and cannot add a product to the weights.
class PlainProducts : public Products {
 public:
  std::string_view name() const override { return "plain"; }
  at::ScalarType gram_dtype(at::ScalarType dtype) const override { return dtype; }
  std::vector<std::int64_t> panel_rows(std::int64_t, at::ScalarType) const override { return {0}; }
  flops::SymmetricCost symmetric_cost(std::int64_t, at::ScalarType) const override { return {}; }
  bool batched(std::int64_t, at::ScalarType) const override { return true; }
  std::int64_t at_once(std::int64_t, std::int64_t, std::int64_t count,
                       at::ScalarType) const override {
    return count;
  }

  void product(const at::Tensor& out, double beta, const at::Tensor& c, double alpha,
               const at::Tensor& a, const at::Tensor& b) const override {
    store(out, beta, c, exact(a).matmul(exact(b)).mul_(alpha));
  }

  bool scales_grams() const override { return true; }

  bool scaled_gram(const at::Tensor& out, double alpha, const at::Tensor& factors,
                   const at::Tensor& a) const override {
    out.copy_(exact(a).matmul(exact(a).mT()).mul_(factors).mul_(alpha));
    return true;
  }

  bool has_wide_squares(at::ScalarType dtype) const override {
    return c10::elementSize(dtype) == 2;
  }

  void wide_gram(const WideSquare& out, double alpha, const at::Tensor& a) const override {
    store(out, exact(a).matmul(exact(a).mT()).mul_(alpha));
  }

  void wide_product(const WideSquare& out, double beta, const WideSquare& c, double alpha,
                    const WideSquare& a, const WideSquare& b) const override {
    const at::Tensor addend = beta == 0 ? at::Tensor() : whole(c).mul_(beta);
    // With a = D + A and b = E + B, D and E their diagonals: only A and B are in 16 bits in A B.
    at::Tensor product = exact(a.narrow).matmul(exact(b.narrow));
    product.add_(whole(b).mul_(exact(a.diagonal).unsqueeze(-1)));
    const at::Tensor beside = whole(a).sub_(exact(a.diagonal).diag_embed());
    product.add_(beside.mul(exact(b.diagonal).unsqueeze(-2))).mul_(alpha);
    store(out, beta == 0 ? product : product.add_(addend));
  }

  void scaled_product(const at::Tensor& out, const PendingProduct& pending) const override {
    const auto& [beta, c, alpha, a, b, factors, scales, scale] = pending;
    store(out, beta, exact(c).mul_(factors), exact(a).matmul(exact(b)).mul_(alpha));
  }

 protected:
  void mirror(const at::Tensor& out, std::int64_t) const override {
    out.copy_(out.tril().add(out.tril(-1).mT()));
  }

 private:
  static at::Tensor exact(const at::Tensor& x) {
    return x.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  }

  static void store(const at::Tensor& out, double beta, const at::Tensor& c,
                    const at::Tensor& product) {
    out.copy_(beta == 0 ? product : product.add(exact(c), beta));
  }

  static void store(const WideSquare& out, const at::Tensor& value) {
    const at::Tensor diagonal = value.diagonal(0, -2, -1);
    out.wide.copy_(value);
    out.diagonal.copy_(diagonal);
    out.narrow.copy_(value.sub(diagonal.diag_embed()));
  }

  // In fp32, from the lower triangle.
  static at::Tensor whole(const WideSquare& x) {
    const at::Tensor wide = exact(x.wide);
    return wide.tril().add_(wide.tril(-1).mT());
  }
};

inline const Products& plain_products() {
  static const PlainProducts kProducts;
  return kProducts;
}

}  // namespace dmuon::newton_schulz
