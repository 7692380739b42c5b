#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "dmuon/bindings/topics.h"
#include "dmuon/core/named.h"
#include "dmuon/newton_schulz/coefficients.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/orthogonalize.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::bindings {
namespace {

namespace py = pybind11;
namespace ns = newton_schulz;

using PyRow = std::tuple<double, double, double>;
using PyCoefficients = std::variant<std::string, std::vector<PyRow>>;

ns::Coefficients resolve(const PyCoefficients& coefficients, int num_steps) {
  if (const auto* name = std::get_if<std::string>(&coefficients)) {
    return ns::resolve(*name, num_steps);
  }
  ns::Coefficients rows;
  for (const auto& [a, b, c] : std::get<std::vector<PyRow>>(coefficients)) {
    rows.push_back({a, b, c});
  }
  return ns::resolve(rows, num_steps);
}

std::vector<PyRow> resolve_coefficients(const PyCoefficients& coefficients, int num_steps) {
  std::vector<PyRow> rows;
  for (const auto& [a, b, c] : resolve(coefficients, num_steps)) rows.emplace_back(a, b, c);
  return rows;
}

at::ScalarType default_dtype(c10::Device device) {
  return ns::elementwise_of(device).default_dtype();
}

ns::Choice choose(std::int64_t m, std::int64_t n, const PyCoefficients& coefficients, int num_steps,
                  c10::Device device, at::ScalarType dtype) {
  return ns::choose(m, n, resolve(coefficients, num_steps), device, dtype);
}

std::vector<std::string> elementwise(c10::Device device, at::ScalarType dtype) {
  std::vector<std::string> names;
  for (const ns::Elementwise* one : ns::elementwise_all(device, dtype))
    names.emplace_back(one->name());
  return names;
}

std::vector<ns::Choice> candidates(std::int64_t m, std::int64_t n,
                                   const PyCoefficients& coefficients, int num_steps,
                                   c10::Device device, at::ScalarType dtype) {
  return ns::candidates(m, n, resolve(coefficients, num_steps), device, dtype);
}

void symmetric_product(const std::string& backend, std::int64_t panel_rows, const at::Tensor& out,
                       double beta, const at::Tensor& c, double alpha, const at::Tensor& a,
                       const at::Tensor& b) {
  const at::NoGradGuard no_grad;
  const auto all = ns::products_of(out.device(), out.scalar_type());
  core::named(all, backend, "symmetric_product: backend must be", &ns::Products::name)
      ->symmetric_product(out, beta, c, alpha, a, b, panel_rows);
}

void product(const std::string& backend, const at::Tensor& out, double beta, const at::Tensor& c,
             double alpha, const at::Tensor& a, const at::Tensor& b) {
  const at::NoGradGuard no_grad;
  const auto all = ns::products_of(out.device(), out.scalar_type());
  core::named(all, backend, "product: backend must be", &ns::Products::name)
      ->product(out, beta, c, alpha, a, b);
}

at::Tensor orthogonalize(const at::Tensor& x, const PyCoefficients& coefficients, int num_steps,
                         double eps, std::optional<at::ScalarType> dtype,
                         std::optional<ns::Choice> choice, std::optional<ns::Form> form,
                         std::optional<at::ScalarType> gram_dtype) {
  ns::IterationOptions options{.coefficients = resolve(coefficients, num_steps),
                               .eps = eps,
                               .dtype = dtype.value_or(default_dtype(x.device())),
                               .choice = std::move(choice),
                               .form = form,
                               .gram_dtype = gram_dtype};
  return ns::orthogonalize(x, options);
}

}  // namespace

void init_newton_schulz(py::module_& module) {
  py::enum_<ns::Form>(module, "Form")
      .value("DIRECT", ns::Form::kDirect)
      .value("SEGMENTED", ns::Form::kSegmented)
      .value("GRAM", ns::Form::kGram);
  py::class_<ns::Choice>(module, "Choice")
      .def(py::init<std::string, ns::Form, bool, std::int64_t, std::string>(), py::arg("backend"),
           py::arg("form"), py::arg("batched"), py::arg("panel_rows"), py::arg("elementwise") = "")
      .def_readonly("backend", &ns::Choice::backend)
      .def_readonly("form", &ns::Choice::form)
      .def_readonly("batched", &ns::Choice::batched)
      .def_readonly("panel_rows", &ns::Choice::panel_rows)
      .def_readonly("elementwise", &ns::Choice::elementwise)
      .def("__eq__",
           [](const ns::Choice& one, const py::object& other) {
             return py::isinstance<ns::Choice>(other) && one == other.cast<ns::Choice>();
           })
      .def("__hash__", [](const ns::Choice& one) {
        return py::hash(py::make_tuple(one.backend, static_cast<int>(one.form), one.batched,
                                       one.panel_rows, one.elementwise));
      });
  module.def("orthogonalize", &orthogonalize, py::arg("x"), py::arg("coefficients"),
             py::arg("num_steps"), py::arg("eps"), py::arg("dtype"), py::kw_only(),
             py::arg("choice") = std::nullopt, py::arg("form") = std::nullopt,
             py::arg("gram_dtype") = std::nullopt, py::call_guard<py::gil_scoped_release>());
  module.attr("EPS") = ns::kDefaultEps;
  module.def("resolve_coefficients", &resolve_coefficients, py::arg("coefficients"),
             py::arg("num_steps"));
  module.def("default_ns_dtype", &default_dtype, py::arg("device"));
  // Without the GIL: they may wait for another thread's self-test of kernels.
  const py::call_guard<py::gil_scoped_release> no_gil;
  module.def("choose", &choose, py::arg("m"), py::arg("n"), py::arg("coefficients"),
             py::arg("num_steps"), py::arg("device"), py::arg("dtype"), no_gil);
  module.def("elementwise", &elementwise, py::arg("device"), py::arg("dtype"), no_gil);
  module.def("memo_words", &ns::memo_words, py::arg("device"), no_gil);
  module.def("why_no_cuda_kernels", &ns::why_no_cuda_kernels, py::arg("device"), no_gil);
  module.def("prefers_cuda_kernels", &ns::prefers_cuda_kernels, py::arg("device"), no_gil);
  // For tests and benchmarks of single products: not checked.
  module.def("symmetric_product", &symmetric_product, py::arg("backend"), py::arg("panel_rows"),
             py::arg("out"), py::arg("beta"), py::arg("c"), py::arg("alpha"), py::arg("a"),
             py::arg("b"), no_gil);
  module.def("product", &product, py::arg("backend"), py::arg("out"), py::arg("beta"), py::arg("c"),
             py::arg("alpha"), py::arg("a"), py::arg("b"), no_gil);
  module.def("candidates", &candidates, py::arg("m"), py::arg("n"), py::arg("coefficients"),
             py::arg("num_steps"), py::arg("device"), py::arg("dtype"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace dmuon::bindings
