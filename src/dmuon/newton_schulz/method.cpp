#include "dmuon/newton_schulz/method.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "dmuon/core/error.h"
#include "dmuon/core/named.h"
#include "dmuon/newton_schulz/cuda_kernels.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
using core::require;

// An H200 took less time by dmuon's kernels from this short side on (tests/gpu/README.md). In the
// direct form it took as long at 2048, and less at 3584.
std::int64_t preferred_side(Form form) { return form == Form::kGram ? 2048 : 3072; }

// True if the backend has panels that omit a part of symmetric products.
bool omits(const Products& backend, std::int64_t m, at::ScalarType dtype) {
  return std::ranges::any_of(backend.panel_rows(m, dtype),
                             [&](std::int64_t rows) { return num_panels(m, rows) > 1; });
}

// Returns nothing if the backend lacks the form.
std::optional<flops::Segments> segments_of(Form form, const Products& backend, std::int64_t m,
                                           std::int64_t n, const Coefficients& coefficients,
                                           at::ScalarType dtype) {
  if (form != Form::kSegmented) {
    return flops::segments(static_cast<int>(std::ssize(coefficients)), form);
  }
  const bool offers =
      dtype == at::kHalf ? omits(backend, std::min(m, n), dtype) : backend.has_wide_squares(dtype);
  return offers ? measured_segments(coefficients, m, n, dtype) : std::nullopt;
}

// Counts the steps by themselves whose c is 0.
int num_cubic(const flops::Segments& segments, const Coefficients& coefficients) {
  int count = 0;
  std::size_t step = 0;
  for (const int length : segments) {
    if (length == 1 && coefficients.at(step).c == 0) ++count;
    step += static_cast<std::size_t>(length);
  }
  return count;
}

// Returns the choices of one backend. The first has the fewest FLOPs, the default panels and, if
// the backend batches such matrices, a batch.
std::vector<Choice> candidates_of(const Products& backend, std::int64_t m, std::int64_t n,
                                  const Coefficients& coefficients, c10::Device device,
                                  at::ScalarType dtype) {
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
    // On an H200 the segmented form was at best as fast: there `dmuon tune` alone chooses it.
    if (choice.form == Form::kSegmented && !device.is_cpu())
      return std::numeric_limits<double>::infinity();
    const flops::Segments lengths = *segments(choice.form);
    return flops::orthogonalisation(m, n, lengths, choice.form, backend.symmetric_cost(side, dtype),
                                    num_cubic(lengths, coefficients));
  });
  std::rotate(found.begin(), best, best + 1);
  std::vector<Choice> in_panels{found.front()};
  const auto segmented = std::ranges::find(found, Form::kSegmented, &Choice::form);
  if (segmented != found.begin() && segmented != found.end()) in_panels.push_back(*segmented);
  for (const std::int64_t others : std::span(panel_rows).subspan(1)) {
    for (Choice& choice : in_panels) {
      choice.panel_rows = others;
      found.push_back(choice);
    }
  }
  return found;
}

const Products& backend_named(const std::string& name, c10::Device device, at::ScalarType dtype,
                              std::string_view function) {
  // Without a look at the others, which may test kernels on the device.
  if (const Products& usual = default_products(device, dtype); usual.name() == name) return usual;
  return *core::named(products_of(device, dtype), name,
                      core::message(function, ": choice.backend must be"), &Products::name, " for ",
                      dtype, " on ", device, " on this machine");
}

const Elementwise& elementwise_named(const std::string& name, c10::Device device,
                                     at::ScalarType dtype, std::string_view function) {
  if (name.empty()) return default_elementwise(device, dtype);
  const std::vector<const Elementwise*> all = elementwise_all(device, dtype);
  // Another rank's device may run what fails on this one: the rank goes on by the default.
  const bool is_missing = std::ranges::find(all, name, &Elementwise::name) == all.end();
  if (!device.is_cpu() && name == cuda_elementwise().name() && is_missing) return *all.front();
  return *core::named(all, name, core::message(function, ": choice.elementwise must be"),
                      &Elementwise::name, " for ", dtype, " on ", device, " on this machine");
}

// Appends views of the single matrices of [..., rows, cols]. A reshape would copy blocks of
// columns.
void append_matrices(const Tensor& batch, std::int64_t matrix_dims, std::vector<Tensor>& pieces) {
  if (batch.dim() == matrix_dims) return pieces.push_back(batch);
  for (std::int64_t i = 0; i < batch.size(0); ++i)
    append_matrices(batch.select(0, i), matrix_dims, pieces);
}

}  // namespace

void check(const IterationOptions& options, std::string_view function) {
  require(is_floating(options.dtype), function, ": dtype must be fp64, fp32, bf16 or fp16; got ",
          options.dtype);
  require(0 <= options.eps && std::isfinite(options.eps), function,
          ": eps must be at least 0 and finite; got ", options.eps);
  require(!options.gram_dtype || *options.gram_dtype == options.dtype ||
              *options.gram_dtype == at::kFloat || *options.gram_dtype == at::kDouble,
          function, ": gram_dtype must be dtype, fp32 or fp64; got ",
          options.gram_dtype.value_or(options.dtype));
}

std::vector<Choice> candidates(std::int64_t m, std::int64_t n, const Coefficients& coefficients,
                               c10::Device device, at::ScalarType dtype) {
  std::vector<Choice> all;
  for (const Products* backend : products_of(device, dtype)) {
    const std::vector<Choice> some = candidates_of(*backend, m, n, coefficients, device, dtype);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

Choice choose(std::int64_t m, std::int64_t n, const Coefficients& coefficients, c10::Device device,
              at::ScalarType dtype, std::optional<Form> form) {
  Choice usual =
      candidates_of(default_products(device, dtype), m, n, coefficients, device, dtype).front();
  usual.form = form.value_or(usual.form);
  if (usual.form != Form::kSegmented && std::min(m, n) >= preferred_side(usual.form) &&
      half_of(dtype) && prefers_cuda_kernels(device)) {
    usual.backend = cuda_products().name();
    usual.panel_rows = cuda_products().panel_rows(std::min(m, n), dtype).front();
  }
  return usual;
}

std::vector<Tensor> Method::pieces_of(const Tensor& batch, std::int64_t matrix_dims) const {
  std::vector<Tensor> pieces;
  if (batch.numel() == 0) return pieces;
  if (!batched) {
    append_matrices(batch, matrix_dims, pieces);
    return pieces;
  }
  if (batch.dim() == matrix_dims) return {batch.unsqueeze(0)};
  // A piece has all blocks of columns of its matrices.
  std::int64_t in_one = 1;
  for (std::int64_t i = 1; i < batch.dim() - matrix_dims; ++i) in_one *= batch.size(i);
  const std::int64_t at_once = products.at_once(rows, cols, in_one * batch.size(0), dtype);
  const std::int64_t step = std::max<std::int64_t>(1, at_once / in_one);
  for (std::int64_t first = 0; first < batch.size(0); first += step)
    pieces.push_back(batch.narrow(0, first, std::min(step, batch.size(0) - first)));
  return pieces;
}

Method method_for(std::int64_t rows, std::int64_t cols, c10::Device device,
                  const IterationOptions& options, std::string_view function) {
  check(options, function);
  const auto& [name, chosen_form, batched, panel_rows, elementwise] =
      options.choice
          ? *options.choice
          : choose(rows, cols, options.coefficients, device, options.dtype, options.form);
  const Form form = options.form.value_or(chosen_form);
  const Products& backend = backend_named(name, device, options.dtype, function);
  require(!batched || backend.batched(std::min(rows, cols), options.dtype), function,
          ": choice.batched must be false for ", rows, " x ", cols, " in ", options.dtype, " on ",
          device, "; got true");
  const std::vector<std::int64_t> panels = backend.panel_rows(std::min(rows, cols), options.dtype);
  require(panels.size() == 1 ? panel_rows == panels.front() : panel_rows >= 0, function,
          ": choice.panel_rows must be ",
          panels.size() == 1 ? std::to_string(panels.front()) : "at least 0", "; got ", panel_rows);
  const auto segments = segments_of(form, backend, rows, cols, options.coefficients, options.dtype);
  require(segments.has_value(), function, ": ", options.form ? "form" : "choice.form",
          " must be direct or Gram for ", rows, " x ", cols, " in ", options.dtype,
          " with these coefficients by the backend '", name, "'; got segmented");
  std::optional<at::ScalarType> square_dtype = options.dtype;
  if (form == Form::kGram)
    square_dtype = options.gram_dtype.value_or(backend.gram_dtype(options.dtype));
  const bool segmented = form == Form::kSegmented;
  if (segmented && options.dtype != at::kHalf) square_dtype = std::nullopt;  // WideSquares
  return {rows,          cols,
          backend,       elementwise_named(elementwise, device, options.dtype, function),
          batched,       {options.coefficients, *segments, square_dtype, panel_rows, segmented},
          options.dtype, options.eps};
}

}  // namespace dmuon::newton_schulz
