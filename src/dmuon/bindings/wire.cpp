#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "dmuon/bindings/topics.h"
#include "dmuon/wire/shards.h"
#include "dmuon/wire/shared_mesh.h"

namespace dmuon::bindings {
namespace py = pybind11;
using wire::Group;
using wire::SharedMesh;

void init_wire(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
  py::class_<Group>(module, "Group")
      .def(py::init([](const std::optional<ProcessGroup>& group, std::string name, int rank,
                       int size, const std::string& device_type, std::vector<int> order,
                       const std::optional<ProcessGroup>& down) {
             return Group(group.value_or(ProcessGroup()), std::move(name), rank, size,
                          c10::Device(device_type).type(), std::move(order),
                          down.value_or(ProcessGroup()));
           }),
           py::arg("group"), py::arg("name"), py::arg("rank"), py::arg("size"),
           py::arg("device_type"), py::arg("order") = std::vector<int>(),
           py::arg("down") = std::nullopt);

  py::class_<wire::TensorParallel>(module, "TensorParallel")
      .def(py::init([](Group slices, Group host) {
             return wire::TensorParallel{std::move(slices), std::move(host)};
           }),
           py::arg("slices"), py::arg("host"));

  py::class_<SharedMesh>(module, "SharedMesh")
      .def(py::init([](Group row, Group column, Group host_row, Group host_column, Group everyone,
                       std::optional<wire::TensorParallel> tensor_parallel) {
             return SharedMesh{.along = {std::move(row), std::move(column)},
                               .host = {std::move(host_row), std::move(host_column)},
                               .everyone = std::move(everyone),
                               .tensor_parallel = std::move(tensor_parallel)};
           }),
           py::arg("row"), py::arg("column"), py::arg("host_row"), py::arg("host_column"),
           py::arg("everyone"), py::arg("tensor_parallel"))
      .def(
          "add_other", [](SharedMesh& mesh, Group group) { mesh.others->add(std::move(group)); },
          py::arg("group"))
      .def("release_turn", [](SharedMesh& mesh) { mesh.turn->release(); })
      .def("look_away", [](SharedMesh& mesh) { mesh.watch->look_away(); })
      .def("failure", &SharedMesh::failure)
      .def("raised", [](const SharedMesh& mesh) { mesh.watch->raised(); })
      .def(
          "leave",
          [](SharedMesh& mesh, int grace_ms) {
            return mesh.leave(std::chrono::milliseconds(grace_ms));
          },
          py::arg("grace_ms"), no_gil);
  module.attr("PIECE_ELEMENTS") = wire::kPieceElements;
}

}  // namespace dmuon::bindings
