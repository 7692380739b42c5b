#include "dmuon/catalog/catalog.h"

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"

namespace dmuon::bindings {
namespace py = pybind11;
using catalog::Model;

void init_catalog(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<Model>(module, "Model", "The weight matrices of a model, as a file of models/.")
      .def_readonly("name", &Model::name)
      .def_readonly("description", &Model::description)
      .def_readonly("source", &Model::source)
      .def_readonly("stand_in", &Model::stand_in)
      .def_readonly("inventory", &Model::inventory)
      .def_property_readonly("sequence", [](const Model& model) { return model.training.sequence; })
      .def(
          "forward_flops",
          [](const Model& model, double tokens) {
            return catalog::forward_flops(model.training, tokens);
          },
          py::arg("tokens"));
  module.def("model_names", &catalog::model_names);
  module.def("model", &catalog::model, py::arg("name"), py::arg("tensor_parallel") = false, no_gil);
  module.def("model_from_json", &catalog::model_from_json, py::arg("text"),
             py::arg("tensor_parallel") = false, no_gil);
  module.def("device_names", &catalog::device_names);
  module.def("network_names", &catalog::network_names);
}

}  // namespace dmuon::bindings
