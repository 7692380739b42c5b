#include <ATen/Parallel.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cpu/products.h"
#include "dmuon/newton_schulz/cpu_threads.h"
#include "dmuon/newton_schulz/products/cpu.h"

namespace dmuon::newton_schulz {

bool kernels_multiply(at::ScalarType dtype) {
  if (dtype == at::kFloat) return kernels::cpu::multiplies(kernels::cpu::Dtype::kFloat);
  return dtype == at::kBFloat16 && kernels::cpu::multiplies(kernels::cpu::Dtype::kBFloat16);
}

namespace {

using at::Tensor;

// An fp32 FLOP takes this many bf16 FLOPs' time: 105 against 213 GFLOP/s a core.
constexpr double kFp32CostOfKernels = 2.05;
// The same where the processor prefers fp32: 150 against 82.
constexpr double kPreferredFp32CostOfKernels = 0.55;

kernels::cpu::Workers all_threads() { return {at::get_num_threads(), cpu::on_threads}; }

kernels::cpu::Workers this_thread() {
  return {1, [](std::int64_t count, const kernels::cpu::OnRange& on_range) { on_range(0, count); }};
}

// Returns x, or a copy if its entries lie side by side along neither of its last two dimensions.
Tensor strided(const Tensor& x) {
  return x.stride(-1) == 1 || x.stride(-2) == 1 ? x : x.contiguous();
}

// Multiplies each matrix of a batch on one thread; if there are fewer matrices than threads, each
// on all threads.
void on_each(const Tensor& matrices,
             const std::function<void(std::int64_t i, const kernels::cpu::Workers&)>& multiply) {
  const std::int64_t count = matrices.dim() == 2 ? 1 : matrices.size(0);
  if (count < at::get_num_threads()) {
    for (std::int64_t i = 0; i < count; ++i) multiply(i, all_threads());
    return;
  }
  cpu::on_threads(count, [&, alone = this_thread()](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) multiply(i, alone);
  });
}

// The address of matrix i; 0 for a tensor that is one matrix.
const std::byte* start(const Tensor& x, std::int64_t i) {
  return static_cast<const std::byte*>(x.const_data_ptr()) +
         (i == 0 ? 0 : i * x.stride(0) * static_cast<std::int64_t>(x.element_size()));
}

template <typename T>
T* data(const Tensor& x, std::int64_t i) {
  return reinterpret_cast<T*>(const_cast<std::byte*>(start(x, i)));
}

kernels::cpu::Operand operand(const Tensor& x, std::int64_t i) {
  return {start(x, i), x.stride(-2), x.stride(-1)};
}

kernels::cpu::WideSquare square(const WideSquare& x, std::int64_t i) {
  return {data<float>(x.wide, i), data<float>(x.diagonal, i), data<void>(x.narrow, i)};
}

void multiply(const Tensor& out, const PendingProduct& given, bool symmetric,
              std::optional<double> decay = {}) {
  const Tensor a = strided(given.a);
  const Tensor b = strided(given.b);
  const bool adds = given.beta != 0;
  const Tensor c = !adds || given.c.stride(-1) == 1 ? given.c : given.c.contiguous();
  const Tensor& factors = given.factors;
  const bool of_rows = factors.defined() && factors.size(-1) == 1 && given.c.size(-1) != 1;
  const auto dtype =
      a.scalar_type() == at::kFloat ? kernels::cpu::Dtype::kFloat : kernels::cpu::Dtype::kBFloat16;
  on_each(out, [&](std::int64_t i, const kernels::cpu::Workers& workers) {
    const float* factors_of_one = factors.defined() ? data<float>(factors, i) : nullptr;
    kernels::cpu::multiply({.rows = out.size(-2),
                            .cols = out.size(-1),
                            .inner = a.size(-1),
                            .alpha = given.alpha,
                            .a = operand(a, i),
                            .b = operand(b, i),
                            .beta = given.beta,
                            .c = adds ? start(c, i) : nullptr,
                            .c_stride = adds ? c.stride(-2) : 0,
                            .out = data<void>(out, i),
                            .out_stride = out.stride(-2),
                            .symmetric = symmetric,
                            .decay = decay,
                            .row_factors = of_rows ? factors_of_one : nullptr,
                            .col_factors = of_rows ? nullptr : factors_of_one},
                           dtype, workers);
  });
}

class Avx512Products final : public CpuProducts {
 public:
  std::string_view name() const override { return "avx512"; }

  // The kernels' panels have one height.
  std::vector<std::int64_t> panel_rows(std::int64_t m, at::ScalarType dtype) const override {
    return kernels_multiply(dtype) ? std::vector<std::int64_t>{kernels::cpu::kTile}
                                   : CpuProducts::panel_rows(m, dtype);
  }

  flops::SymmetricCost symmetric_cost(std::int64_t m, at::ScalarType dtype) const override {
    if (!kernels_multiply(dtype)) return CpuProducts::symmetric_cost(m, dtype);
    const double fp32_cost = prefers_bf16() ? kFp32CostOfKernels : kPreferredFp32CostOfKernels;
    return {.share = panels_share(num_panels(m, kernels::cpu::kTile)),
            .gram_dtype = dtype == at::kBFloat16 ? fp32_cost : 1};
  }

  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    if (!kernels_multiply(out.scalar_type()) || out.stride(-1) != 1) {
      return CpuProducts::product(out, beta, c, alpha, a, b);
    }
    multiply(out, {beta, c, alpha, a, b}, /*symmetric=*/false);
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b, std::int64_t panel_rows) const override {
    if (!kernels_multiply(out.scalar_type())) {
      return CpuProducts::symmetric_product(out, beta, c, alpha, a, b, panel_rows);
    }
    // A matrix times itself is symmetric here. As its own transpose it is packed once.
    multiply(out, {beta, c, alpha, a, a.is_same(b) ? b.mT() : b}, /*symmetric=*/true);
  }

  bool has_wide_squares(at::ScalarType dtype) const override {
    return dtype == at::kBFloat16 && kernels_multiply(dtype);
  }

  void wide_gram(const WideSquare& out, double alpha, const Tensor& x) const override {
    const Tensor a = strided(x);
    on_each(a, [&](std::int64_t i, const kernels::cpu::Workers& workers) {
      kernels::cpu::multiply({.m = a.size(-2),
                              .inner = a.size(-1),
                              .alpha = alpha,
                              .a = operand(a, i),
                              .out = square(out, i)},
                             workers);
    });
  }

  void wide_product(const WideSquare& out, double beta, const WideSquare& c, double alpha,
                    const WideSquare& a, const WideSquare& b) const override {
    on_each(out.wide, [&](std::int64_t i, const kernels::cpu::Workers& workers) {
      kernels::cpu::multiply({.m = out.wide.size(-1),
                              .alpha = alpha,
                              .a = square(a, i),
                              .b = square(b, i),
                              .beta = beta,
                              .c = data<float>(c.wide, i),
                              .out = square(out, i)},
                             workers);
    });
  }

  void scaled_product(const Tensor& out, const PendingProduct& pending) const override {
    core::invariant(out.stride(-1) == 1, "scaled_product: entries of a row must lie side by side");
    multiply(out, pending, /*symmetric=*/false);
  }

  bool add_to_weights(const Tensor& weights, const Scalar& decay, const Scalar& factor,
                      const PendingProduct& pending, const Tensor& applies) const override {
    if (!kernels_multiply(pending.c.scalar_type()) || pending.scales.defined() ||
        weights.dim() > 3 || weights.stride(-1) != 1) {
      return false;
    }
    if (!applies.item<bool>()) return true;
    PendingProduct scaled = pending;
    scaled.beta *= factor.value;
    scaled.alpha *= factor.value;
    multiply(weights, scaled, /*symmetric=*/false, decay.value);
    return true;
  }
};

}  // namespace

const Products& avx512_products() {
  static const Avx512Products kProducts;
  return kProducts;
}

}  // namespace dmuon::newton_schulz
