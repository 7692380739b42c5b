#include "dmuon/plan/plan.h"

#include <pybind11/stl.h>

#include <utility>

#include "dmuon/bindings/topics.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::bindings {
namespace py = pybind11;
using plan::Inventory;
using plan::Matrix;
using plan::Plan;

void init_plan(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<Matrix>(module, "Matrix", "One dedicated 2-D parameter.")
      .def(py::init([](std::string name, std::int64_t rows, std::int64_t cols, int unit) {
             return Matrix{std::move(name), rows, cols, unit};
           }),
           py::arg("name"), py::arg("rows"), py::arg("cols"), py::arg("unit"))
      .def_readonly("name", &Matrix::name)
      .def_readonly("rows", &Matrix::rows)
      .def_readonly("cols", &Matrix::cols)
      .def_readonly("unit", &Matrix::unit);

  py::class_<Plan>(module, "Plan", "Who owns what and in which batches.")
      .def_property_readonly("num_replicates", [](const Plan& p) { return p.mesh.num_replicates; })
      .def_property_readonly("num_shards", [](const Plan& p) { return p.mesh.num_shards; })
      .def_readonly("strategy", &Plan::strategy)
      .def_readonly("owner", &Plan::owner)
      .def_property_readonly("batches",
                             [](const Plan& p) {
                               std::vector<std::pair<int, std::vector<int>>> batches;
                               for (const auto& batch : p.batches) {
                                 batches.emplace_back(batch.slot, batch.matrices);
                               }
                               return batches;
                             })
      .def_readonly("slot_s", &Plan::slot_s)
      .def_readonly("makespan_s", &Plan::makespan_s)
      .def_readonly("lower_bound_s", &Plan::lower_bound_s)
      .def("to_json", &plan::to_json, no_gil)
      .def_static("from_json", &plan::from_json, py::arg("text"), py::arg("inventory"), no_gil)
      .def("hash", &plan::hash, py::arg("inventory"), no_gil)
      .def("table", &plan::table, py::arg("inventory"), no_gil);

  module.def(
      "make_plan",
      [](const Inventory& inventory, int num_replicates, int num_shards,
         const std::string& strategy, const std::string& device_kind) {
        return plan::make_plan(inventory, {num_replicates, num_shards}, strategy, device_kind);
      },
      py::arg("inventory"), py::arg("num_replicates"), py::arg("num_shards"), py::arg("strategy"),
      py::arg("device_kind"), no_gil);
  module.def("strategy_names", &plan::strategy_names);
}

}  // namespace dmuon::bindings
