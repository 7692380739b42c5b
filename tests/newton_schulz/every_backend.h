#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/products.h"
#include "tests/newton_schulz/plain_products.h"

namespace dmuon::newton_schulz {

using at::Tensor;

inline constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
inline const Tensor kTrue = at::scalar_tensor(true, at::kBool);
inline const Tensor kFalse = at::scalar_tensor(false, at::kBool);
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Unit roundoff times a margin for the sum's length.
inline double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-14;
    case at::kFloat:
      return 2e-6;
    case at::kBFloat16:
      return 4e-3;
    default:
      return 5e-4;
  }
}

inline Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) {
  // The default generator has another seed in every process: now and then a sum of one element
  // nearly vanishes.
  static const at::Generator generator = at::detail::createCPUGenerator(0);
  return at::randn(sizes, generator, at::kDouble).to(dtype);
}

inline Tensor filled(at::IntArrayRef sizes, double value, at::ScalarType dtype) {
  return at::full(sizes, value, at::TensorOptions(dtype));
}

// beta c + alpha a b of two matrices, entry by entry in fp64.
inline Tensor plain_product(double beta, const Tensor& c, double alpha, const Tensor& a,
                            const Tensor& b) {
  const Tensor out = c.to(at::kDouble).mul(beta);
  const Tensor left = a.to(at::kDouble).contiguous();
  const Tensor right = b.to(at::kDouble).mT().contiguous();
  const std::int64_t inner = a.size(1);
  for (std::int64_t row = 0; row < out.size(0); ++row) {
    for (std::int64_t col = 0; col < out.size(1); ++col) {
      const double* x = left.const_data_ptr<double>() + row * inner;
      const double* y = right.const_data_ptr<double>() + col * inner;
      double sum = 0;
      for (std::int64_t k = 0; k < inner; ++k) sum += x[k] * y[k];
      out.mutable_data_ptr<double>()[row * out.size(1) + col] += alpha * sum;
    }
  }
  return out;
}

inline void expect_near(const Tensor& got, const Tensor& exact, const std::string& where) {
  ASSERT_EQ(got.sizes(), exact.sizes()) << where;
  const double error = got.to(at::kDouble).sub(exact).norm().item().toDouble();
  EXPECT_LE(error, tolerance(got.scalar_type()) * exact.norm().item().toDouble()) << where;
}

struct ProductsCase {
  const char* name;
  const Products& (*products)();
};

// All products, on CPU tensors.
class EveryProducts : public testing::TestWithParam<ProductsCase> {
 public:
  static auto all() {
    return testing::Values(
        ProductsCase{"cpu", cpu_products}, ProductsCase{"avx512", avx512_products},
        ProductsCase{"aten", aten_products}, ProductsCase{"plain", plain_products});
  }
  static std::string name_of(const testing::TestParamInfo<ProductsCase>& info) {
    return info.param.name;
  }

 protected:
  const Products& products_ = GetParam().products();
};

struct ElementwiseCase {
  const char* name;
  const Elementwise& (*elementwise)();
};

// All elementwise operations, on CPU tensors.
class EveryElementwise : public testing::TestWithParam<ElementwiseCase> {
 public:
  static auto all() {
    return testing::Values(ElementwiseCase{"cpu", cpu_elementwise},
                           ElementwiseCase{"aten", aten_elementwise});
  }
  static std::string name_of(const testing::TestParamInfo<ElementwiseCase>& info) {
    return info.param.name;
  }

 protected:
  const Elementwise& elementwise_ = GetParam().elementwise();
};

}  // namespace dmuon::newton_schulz
