#include "dmuon/newton_schulz/orthogonalize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/core/named.h"
#include "dmuon/newton_schulz/backend.h"
#include "dmuon/newton_schulz/iteration.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
using core::require;

bool floating(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

// None where the backend does not have the form.
std::optional<flops::Segments> segments_of(Form form, const Backend& backend, std::int64_t m,
                                           std::int64_t n, const Coefficients& coefficients,
                                           at::ScalarType dtype) {
  if (form != Form::kSegmented) {
    return flops::segments(static_cast<int>(std::ssize(coefficients)), form);
  }
  if (!backend.has_wide_squares(dtype)) return std::nullopt;
  return measured_segments(coefficients, m, n);
}

// All of one backend: first what takes the fewest FLOPs, by its default panels and in a batch where
// it makes one.
std::vector<Choice> candidates_of(const Backend& backend, std::int64_t m, std::int64_t n,
                                  const Coefficients& coefficients, at::ScalarType dtype) {
  const std::int64_t side = std::min(m, n);
  const std::vector<std::int64_t> panel_rows = backend.panel_rows(side, dtype);
  const auto segments = [&](Form form) {
    return segments_of(form, backend, m, n, coefficients, dtype);
  };
  std::vector<Choice> found;
  for (const Form form : {Form::kDirect, Form::kSegmented, Form::kGram}) {
    if (!segments(form)) continue;
    if (backend.batched(side, dtype)) {
      found.push_back({std::string(backend.name()), form, true, panel_rows.front()});
    }
    found.push_back({std::string(backend.name()), form, false, panel_rows.front()});
  }
  const auto best = std::ranges::min_element(found, {}, [&](const Choice& choice) {
    return flops::orthogonalisation(m, n, *segments(choice.form), choice.form,
                                    backend.symmetric_cost(side, dtype));
  });
  std::rotate(found.begin(), best, best + 1);
  for (const std::int64_t others : std::span(panel_rows).subspan(1)) {
    found.push_back(found.front());
    found.back().panel_rows = others;
  }
  return found;
}

const Backend& backend_named(const std::string& name, c10::Device device, at::ScalarType dtype) {
  return *core::named(backends_of(device, dtype), name, "orthogonalize: choice.backend must be",
                      &Backend::name, " for ", dtype, " on ", device, " on this machine");
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

// What is chosen for matrices of one shape.
struct Chosen {
  const Backend& backend;
  bool batched = false;
  Steps steps = {};
};

Chosen chosen_for(std::int64_t rows, std::int64_t cols, c10::Device device,
                  const IterationOptions& options) {
  const auto& [name, chosen_form, batched, panel_rows] =
      options.choice ? *options.choice
                     : choose(rows, cols, options.coefficients, device, options.dtype);
  const Form form = options.form.value_or(chosen_form);
  const Backend& backend = backend_named(name, device, options.dtype);
  require(!batched || backend.batched(std::min(rows, cols), options.dtype),
          "orthogonalize: choice.batched must be false for ", rows, " x ", cols, " in ",
          options.dtype, " on ", device, "; got true");
  const std::vector<std::int64_t> panels = backend.panel_rows(std::min(rows, cols), options.dtype);
  require(panels.size() == 1 ? panel_rows == panels.front() : panel_rows >= 0,
          "orthogonalize: choice.panel_rows must be ",
          panels.size() == 1 ? std::to_string(panels.front()) : "at least 0", "; got ", panel_rows);
  const auto segments = segments_of(form, backend, rows, cols, options.coefficients, options.dtype);
  require(segments.has_value(), "orthogonalize: ", options.form ? "form" : "choice.form",
          " must be direct or Gram for ", rows, " x ", cols, " in ", options.dtype,
          " with these coefficients by the backend '", name, "'; got segmented");
  std::optional<at::ScalarType> square_dtype = options.dtype;
  if (form == Form::kGram)
    square_dtype = options.gram_dtype.value_or(backend.gram_dtype(options.dtype));
  if (form == Form::kSegmented) square_dtype = std::nullopt;
  return {backend, batched, {options.coefficients, *segments, square_dtype, panel_rows}};
}

void update_as(const Update& update, const Chosen& chosen, const IterationOptions& options) {
  Start start = chosen.backend.start(update, options.dtype, options.eps);
  chosen.backend.finish(update, iterate(chosen.backend, std::move(start), chosen.steps));
}

// What `part` makes of the matrices.
template <typename Part>
Update part_of(const Update& update, const Part& part) {
  Update some = update;
  for (Tensor* tensor : {&some.master, &some.momentum, &some.gradient}) *tensor = part(*tensor);
  return some;
}

// All matrices at once, in parts, or one by one. Of blocks of columns a part has whole rows' worth.
void update_each(const Update& update, const Chosen& chosen, const IterationOptions& options) {
  const Tensor& master = update.master;
  const std::int64_t rows = master.size(-2);
  const std::int64_t cols = master.size(-1);
  if (master.dim() == 2) {
    if (!chosen.batched) return update_as(update, chosen, options);
    const auto unsqueezed = [](const Tensor& one) { return one.unsqueeze(0); };
    return update_as(part_of(update, unsqueezed), chosen, options);
  }
  const std::int64_t count = master.numel() / (rows * cols);
  const std::int64_t in_one = count / master.size(0);
  const std::int64_t at_once =
      chosen.batched ? chosen.backend.at_once(rows, cols, count, options.dtype) : 1;
  const std::int64_t step = std::max<std::int64_t>(1, at_once / in_one);
  for (std::int64_t first = 0; first < master.size(0); first += step) {
    const std::int64_t size = std::min(step, master.size(0) - first);
    const auto narrowed = [&](const Tensor& all) { return all.narrow(0, first, size); };
    const auto selected = [&](const Tensor& all) { return all.select(0, first); };
    if (chosen.batched) {
      update_as(part_of(update, narrowed), chosen, options);
    } else {
      update_each(part_of(update, selected), chosen, options);
    }
  }
}

void check(const Update& update) {
  for (const auto& [name, tensor] : {std::pair{"master", update.master},
                                     {"momentum", update.momentum},
                                     {"gradient", update.gradient}}) {
    require(tensor.defined() && tensor.dim() >= 2 && tensor.layout() == at::kStrided &&
                tensor.scalar_type() == at::kFloat && tensor.device() == update.master.device() &&
                tensor.sizes() == update.master.sizes(),
            "update: ", name, " must be dense fp32 of master's sizes, [..., rows, cols], on its ",
            "device; got ", tensor.defined() ? tensor.toString() : "nothing", " ",
            tensor.defined() ? tensor.sizes() : at::IntArrayRef());
  }
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
  const auto& [backend, batched, steps] = chosen_for(rows, cols, x.device(), options);
  const auto iterated = [&, &backend = backend, &steps = steps](const Tensor& normalised) {
    const Tensor result = steps.coefficients.empty()
                              ? normalised
                              : computed(backend, iterate(backend, {normalised}, steps));
    return result.narrow(-2, 0, rows).narrow(-1, 0, cols);
  };
  Tensor matrices = std::exchange(x, {}).detach().reshape({-1, rows, cols});
  const std::int64_t count = matrices.size(0);
  const std::int64_t at_once = batched ? backend.at_once(rows, cols, count, options.dtype) : 1;
  const auto normalised = [&, &backend = backend, batched = batched](const Tensor& some) {
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

void update(const Update& update, const IterationOptions& options) {
  check(update);
  check(update.gradient, options);
  const at::NoGradGuard no_grad;
  if (update.master.numel() == 0) return;
  if (options.coefficients.empty()) {
    const Backend& backend = backend_of(update.master.device());
    return backend.move_weights(update, orthogonalize(backend.take_momentum(update), options));
  }
  const Chosen chosen =
      chosen_for(update.master.size(-2), update.master.size(-1), update.master.device(), options);
  update_each(update, chosen, options);
}

}  // namespace dmuon::newton_schulz
