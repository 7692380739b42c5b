#include <ATen/Parallel.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/products.h"
#include "dmuon/newton_schulz/backends/cpu.h"
#include "dmuon/newton_schulz/backends/cpu_threads.h"

namespace dmuon::newton_schulz {

bool kernels_multiply(at::ScalarType dtype) {
  if (dtype == at::kFloat) return kernels::multiplies(kernels::Dtype::kFloat);
  return dtype == at::kBFloat16 && kernels::multiplies(kernels::Dtype::kBFloat16);
}

namespace {

using at::Tensor;

// Time of an fp32 FLOP over a bf16 one: 105 against 213 GFLOP/s a core.
constexpr double kFp32CostOfKernels = 2.05;

kernels::Workers all_threads() { return {at::get_num_threads(), cpu::on_threads}; }

kernels::Workers this_thread() {
  return {1, [](std::int64_t count, const kernels::OnRange& on_range) { on_range(0, count); }};
}

// One whose entries lie side by side along one of its last two dimensions.
Tensor strided(const Tensor& x) {
  return x.stride(-1) == 1 || x.stride(-2) == 1 ? x : x.contiguous();
}

// Each matrix of a batch on a thread; where there are fewer than threads, each on all of them.
void on_each(const Tensor& matrices,
             const std::function<void(std::int64_t i, const kernels::Workers&)>& multiply) {
  const std::int64_t count = matrices.dim() == 2 ? 1 : matrices.size(0);
  if (count < at::get_num_threads()) {
    for (std::int64_t i = 0; i < count; ++i) multiply(i, all_threads());
    return;
  }
  cpu::on_threads(count, [&, alone = this_thread()](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) multiply(i, alone);
  });
}

// Of matrix i of a batch, or of the only one.
const std::byte* start(const Tensor& x, std::int64_t i) {
  return static_cast<const std::byte*>(x.const_data_ptr()) +
         (i == 0 ? 0 : i * x.stride(0) * static_cast<std::int64_t>(x.element_size()));
}

template <typename T>
T* data(const Tensor& x, std::int64_t i) {
  return reinterpret_cast<T*>(const_cast<std::byte*>(start(x, i)));
}

kernels::Operand operand(const Tensor& x, std::int64_t i) {
  return {start(x, i), x.stride(-2), x.stride(-1)};
}

kernels::WideSquare square(const WideSquare& x, std::int64_t i) {
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
      a.scalar_type() == at::kFloat ? kernels::Dtype::kFloat : kernels::Dtype::kBFloat16;
  on_each(out, [&](std::int64_t i, const kernels::Workers& workers) {
    const float* factors_of_one = factors.defined() ? data<float>(factors, i) : nullptr;
    kernels::multiply({.rows = out.size(-2),
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

class Avx512Backend final : public CpuBackend {
 public:
  std::string_view name() const override { return "avx512"; }

  // Of the kernels' own height.
  std::vector<std::int64_t> panel_rows(std::int64_t m, at::ScalarType dtype) const override {
    return kernels_multiply(dtype) ? std::vector<std::int64_t>{kernels::kTile}
                                   : CpuBackend::panel_rows(m, dtype);
  }

  flops::SymmetricCost symmetric_cost(std::int64_t m, at::ScalarType dtype) const override {
    if (!kernels_multiply(dtype)) return CpuBackend::symmetric_cost(m, dtype);
    return {.share = panels_share(num_panels(m, kernels::kTile)),
            .gram_dtype = dtype == at::kBFloat16 ? kFp32CostOfKernels : 1};
  }

  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    if (!kernels_multiply(out.scalar_type()) || out.stride(-1) != 1) {
      return CpuBackend::product(out, beta, c, alpha, a, b);
    }
    multiply(out, {beta, c, alpha, a, b}, /*symmetric=*/false);
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b, std::int64_t panel_rows) const override {
    if (!kernels_multiply(out.scalar_type())) {
      return CpuBackend::symmetric_product(out, beta, c, alpha, a, b, panel_rows);
    }
    multiply(out, {beta, c, alpha, a, b}, /*symmetric=*/true);
  }

  bool has_wide_squares(at::ScalarType dtype) const override {
    return dtype == at::kBFloat16 && kernels_multiply(dtype);
  }

  void wide_gram(const WideSquare& out, double alpha, const Tensor& x) const override {
    const Tensor a = strided(x);
    on_each(a, [&](std::int64_t i, const kernels::Workers& workers) {
      kernels::multiply({.m = a.size(-2),
                         .inner = a.size(-1),
                         .alpha = alpha,
                         .a = operand(a, i),
                         .out = square(out, i)},
                        workers);
    });
  }

  void wide_product(const WideSquare& out, double beta, const WideSquare& c, double alpha,
                    const WideSquare& a, const WideSquare& b) const override {
    on_each(out.wide, [&](std::int64_t i, const kernels::Workers& workers) {
      kernels::multiply({.m = out.wide.size(-1),
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

  // The product's sums go to the weights in fp32, never rounded to the dtype.
  void finish(const Update& update, const PendingProduct& product) const override {
    const Tensor& master = update.master;
    if (!kernels_multiply(product.c.scalar_type()) || master.dim() > 3 || master.stride(-1) != 1) {
      return CpuBackend::finish(update, product);
    }
    if (!update.applies.item<bool>()) return;
    PendingProduct moves = product;
    moves.beta *= -update.lr;
    moves.alpha *= -update.lr;
    multiply(master, moves, /*symmetric=*/false, update.decay);
  }
};

}  // namespace

const Backend& avx512_backend() {
  static const Avx512Backend kBackend;
  return kBackend;
}

}  // namespace dmuon::newton_schulz
