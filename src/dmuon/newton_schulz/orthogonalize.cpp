#include "dmuon/newton_schulz/orthogonalize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
using core::require;

bool floating(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

// The iterate X, [(b,) rows, cols], either side the shorter: `tall` matrices are read in the other
// operand order instead of being transposed.
struct Iterate {
  const Backend& backend;
  std::int64_t panel_rows;
  Tensor x;
  Tensor spare;  // X's next value; a product may not overwrite its operand
  bool tall;

  std::int64_t short_side() const { return x.size(tall ? -1 : -2); }

  Tensor square(at::ScalarType dtype) const {
    auto sizes = x.sizes().vec();
    sizes[sizes.size() - 1] = sizes[sizes.size() - 2] = short_side();
    return at::empty(sizes, x.options().dtype(dtype));
  }

  // R <- X X' on the short side, in R's dtype.
  void gram_matrix(const Tensor& r) const {
    const Tensor wide = x.to(r.scalar_type());
    const Tensor transposed = wide.mT();
    symmetric_product(r, 0, r, 1, tall ? transposed : wide, tall ? wide : transposed);
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b) const {
    backend.symmetric_product(out, beta, c, alpha, a, b, panel_rows);
  }

  // X <- a X + Q X. A Q in 16 bits is not quite symmetric: where X is transposed, so is Q.
  void apply(double a, const Tensor& q) {
    if (tall) {
      backend.product(spare, a, x, 1, x, q.mT());
    } else {
      backend.product(spare, a, x, 1, q, x);
    }
    std::swap(x, spare);
  }
};

// Q + a I on the diagonal in fp32: rounding a itself to 16 bits would shift every singular value.
void add_identity(const Tensor& q, double a) {
  Tensor diagonal = q.diagonal(0, -2, -1);
  const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor wide = diagonal.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  at::add_out(diagonal, wide, at::scalar_tensor(a, at::kDouble));
}

// What one matrix, or a batch, keeps of the short side: a segment of one step has no q and scratch.
struct Squares {
  Tensor r;
  Tensor z;
  Tensor q;
  Tensor scratch;
};

// Divided by its norm, a matrix has small singular values, so that Q is close to a multiple of the
// identity. In a segment that leads (flops/newton_schulz.h) that multiple is a number of its own:
// rounding what is left costs less. Later, near 1, the two would cancel, and Q is whole.
void run_segment(Iterate& iterate, Squares& squares, std::span<const Row> rows, bool leads) {
  auto& [r, z, q, scratch] = squares;
  double identity = 0;  // what of it Q leaves out
  // A mirrored triangle has each rounding error twice, of a full product two partly cancel: in 16
  // bits and where Q is whole that is 1.2 instead of 1.8 times the direct form's error.
  const bool in_full = !leads && c10::elementSize(r.scalar_type()) == 2;
  const auto mixed_product = [&](const Tensor& out, double a, const Tensor& c, const Tensor& left,
                                 const Tensor& right) {
    if (in_full) {
      iterate.backend.product(out, a, c, 1, left, right);
    } else {
      iterate.symmetric_product(out, a, c, 1, left, right);
    }
  };
  iterate.gram_matrix(r);
  for (std::size_t step = 0; step < rows.size(); ++step) {
    const auto& [a, b, c] = rows[step];
    const bool first = step == 0;
    const bool last = step + 1 == rows.size();
    iterate.symmetric_product(z, b, r, c, r, r);
    if (first && last) return iterate.apply(a, z.to(iterate.x.scalar_type()));
    if (!first) {
      mixed_product(scratch, a, q, z, q);
      std::swap(q, scratch);
      if (leads) {
        iterate.backend.add(q, z, identity);
        identity *= a;
      }
    }
    if (!last) {
      mixed_product(scratch, a, r, r, z);                       // R Z + a R
      iterate.symmetric_product(r, a, scratch, 1, z, scratch);  // Z (R Z + a R) + a (R Z + a R)
    }
    if (first) {
      std::swap(q, z);
      if (leads) {
        identity = a;
      } else {
        add_identity(q, a);
      }
    }
  }
  iterate.apply(identity, q.to(iterate.x.scalar_type()));
}

void run(Iterate& iterate, const Coefficients& coefficients, const flops::Segments& segments,
         at::ScalarType square_dtype) {
  const bool longer = std::ranges::any_of(segments, [](int length) { return length > 1; });
  const auto square = [&](bool needed) { return needed ? iterate.square(square_dtype) : Tensor(); };
  Squares squares{square(true), square(true), square(longer), square(longer)};
  auto next = coefficients.begin();
  for (const int length : segments) {
    const bool leads = next == coefficients.begin() && flops::leads(segments);
    run_segment(iterate, squares, {next, next + length}, leads);
    next += length;
  }
}

flops::Segments segments_of(Form form, const Coefficients& coefficients, std::int64_t m,
                            std::int64_t n) {
  const flops::Segments plain = flops::segments(static_cast<int>(std::ssize(coefficients)), form);
  if (form != Form::kSegmented) return plain;
  return measured_segments(coefficients, m, n).value_or(plain);
}

// All of one backend: first what takes the fewest FLOPs, by its default panels and in a batch where
// it makes one.
std::vector<Choice> candidates_of(const Backend& backend, std::int64_t m, std::int64_t n,
                                  const Coefficients& coefficients, at::ScalarType dtype) {
  const std::int64_t side = std::min(m, n);
  const std::vector<std::int64_t> panel_rows = backend.panel_rows(side, dtype);
  const bool has_segments =
      dtype == at::kBFloat16 && measured_segments(coefficients, m, n).has_value();
  std::vector<Choice> found;
  for (const Form form : {Form::kDirect, Form::kSegmented, Form::kGram}) {
    if (form == Form::kSegmented && !has_segments) continue;
    if (backend.batched(side, dtype)) {
      found.push_back({std::string(backend.name()), form, true, panel_rows.front()});
    }
    found.push_back({std::string(backend.name()), form, false, panel_rows.front()});
  }
  const auto best = std::ranges::min_element(found, {}, [&](const Choice& choice) {
    const flops::Segments segments = segments_of(choice.form, coefficients, m, n);
    return flops::orthogonalisation(m, n, segments, choice.form,
                                    backend.symmetric_cost(side, dtype));
  });
  std::rotate(found.begin(), best, best + 1);
  for (const std::int64_t others : std::span(panel_rows).subspan(1)) {
    found.push_back(found.front());
    found.back().panel_rows = others;
  }
  return found;
}

const Backend& named(const std::string& name, c10::Device device, at::ScalarType dtype) {
  std::vector<std::string> names;
  for (const Backend* backend : backends_of(device, dtype)) {
    if (backend->name() == name) return *backend;
    names.emplace_back(backend->name());
  }
  throw core::InvalidArgument(core::message("orthogonalize: choice.backend must be one of ",
                                            core::joined(names), " for ", dtype, " on ", device,
                                            " on this machine; got '", name, "'"));
}

void check(const Tensor& x, const IterationOptions& options) {
  require(x.defined() && x.dim() >= 2, "orthogonalize: x must be [..., m, n]; got ",
          x.defined() ? x.dim() : 0, " dimension(s)");
  require(x.layout() == at::kStrided, "orthogonalize: x must be dense; got layout ", x.layout());
  require(floating(x.scalar_type()), "orthogonalize: x must be fp64, fp32, bf16 or fp16; got ",
          x.scalar_type());
  require(floating(options.dtype), "orthogonalize: dtype must be fp64, fp32, bf16 or fp16; got ",
          options.dtype);
  require(0 <= options.eps && options.eps <= 1, "orthogonalize: eps must be in [0, 1]; got ",
          options.eps);
  require(!options.gram_dtype || *options.gram_dtype == options.dtype ||
              *options.gram_dtype == at::kFloat || *options.gram_dtype == at::kDouble,
          "orthogonalize: gram_dtype must be dtype, fp32 or fp64; got ",
          options.gram_dtype.value_or(options.dtype));
}

}  // namespace

std::vector<Choice> candidates(std::int64_t m, std::int64_t n, const Coefficients& coefficients,
                               c10::Device device, at::ScalarType dtype) {
  std::vector<Choice> all;
  for (const Backend* backend : backends_of(device, dtype)) {
    const std::vector<Choice> some = candidates_of(*backend, m, n, coefficients, dtype);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

Choice choose(std::int64_t m, std::int64_t n, const Coefficients& coefficients, c10::Device device,
              at::ScalarType dtype) {
  return candidates_of(*backends_of(device, dtype).front(), m, n, coefficients, dtype).front();
}

Tensor orthogonalize(Tensor x, const IterationOptions& options) {
  check(x, options);
  const at::NoGradGuard no_grad;
  const auto sizes = x.sizes().vec();
  const auto result_options = x.options().dtype(options.dtype);
  if (x.numel() == 0) return at::empty(sizes, result_options);
  const std::int64_t rows = x.size(-2);
  const std::int64_t cols = x.size(-1);
  const auto& [name, chosen_form, batched, panel_rows] =
      options.choice ? *options.choice
                     : choose(rows, cols, options.coefficients, x.device(), options.dtype);
  const Form form = options.form.value_or(chosen_form);
  const Backend& backend = named(name, x.device(), options.dtype);
  require(!batched || backend.batched(std::min(rows, cols), options.dtype),
          "orthogonalize: choice.batched must be false for ", rows, " x ", cols, " in ",
          options.dtype, " on ", x.device(), "; got true");
  const std::vector<std::int64_t> panels = backend.panel_rows(std::min(rows, cols), options.dtype);
  require(panels.size() == 1 ? panel_rows == panels.front() : panel_rows >= 0,
          "orthogonalize: choice.panel_rows must be ",
          panels.size() == 1 ? std::to_string(panels.front()) : "at least 0", "; got ", panel_rows);
  const flops::Segments segments = segments_of(form, options.coefficients, rows, cols);
  const auto square_dtype = form == Form::kGram
                                ? options.gram_dtype.value_or(backend.gram_dtype(options.dtype))
                                : options.dtype;

  const auto iterated = [&](const Tensor& normalised) {
    const bool tall = normalised.size(-2) > normalised.size(-1);
    Iterate iterate{backend, panel_rows, normalised, at::empty_like(normalised), tall};
    run(iterate, options.coefficients, segments, square_dtype);
    return iterate.x.narrow(-2, 0, rows).narrow(-1, 0, cols);
  };
  Tensor matrices = std::exchange(x, {}).detach().reshape({-1, rows, cols});
  const std::int64_t count = matrices.size(0);
  const std::int64_t at_once = batched ? backend.at_once(rows, cols, count, options.dtype) : 1;
  const auto normalised = [&](const Tensor& some) {
    const Tensor result = backend.normalise(some, options.dtype, options.eps);
    return batched ? result : result.squeeze(0);
  };
  if (count <= at_once) {
    const Tensor all = normalised(std::exchange(matrices, {}));
    return iterated(all).contiguous().view(sizes);
  }
  const Tensor out = at::empty(matrices.sizes(), result_options);
  for (std::int64_t first = 0; first < count; first += at_once) {
    const std::int64_t size = std::min(at_once, count - first);
    out.narrow(0, first, size).copy_(iterated(normalised(matrices.narrow(0, first, size))));
  }
  return out.view(sizes);
}

}  // namespace dmuon::newton_schulz
