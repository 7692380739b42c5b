#include "dmuon/engine/engine.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"
#include "dmuon/engine/agreement.h"
#include "dmuon/engine/autograd.h"

namespace dmuon::bindings {
namespace py = pybind11;
using core::LeafIndex;
using core::UnitIndex;
using engine::Engine;
using engine::UnitSpec;
using engine::Verdict;
using wire::Group;
using wire::SharedMesh;

namespace {

using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;
using NoGil = py::call_guard<py::gil_scoped_release>;

void init_mesh(py::module_& module) {
  const NoGil no_gil;
  using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
  py::class_<Group>(module, "Group")
      .def(py::init([](const std::optional<ProcessGroup>& group, std::string name, int rank,
                       int size, const std::string& device_type) {
             return Group(group.value_or(ProcessGroup()), std::move(name), rank, size,
                          c10::Device(device_type).type());
           }),
           py::arg("group"), py::arg("name"), py::arg("rank"), py::arg("size"),
           py::arg("device_type"));

  py::class_<SharedMesh>(module, "SharedMesh")
      .def(py::init(
               [](Group row, Group column, Group order, Group verdict, std::vector<Group> host) {
                 return SharedMesh{{std::move(row), std::move(column)},
                                   std::move(order),
                                   std::move(verdict),
                                   std::move(host)};
               }),
           py::arg("row"), py::arg("column"), py::arg("order"), py::arg("verdict"), py::arg("host"))
      .def(
          "leave",
          [](SharedMesh& mesh, int grace_ms) { mesh.leave(std::chrono::milliseconds(grace_ms)); },
          py::arg("grace_ms"), no_gil);
}

void init_settings(py::module_& module) {
  py::register_local_exception<engine::SettingsDiffer>(module, "SettingsDiffer", PyExc_ValueError);
  py::class_<engine::EngineOptions>(module, "EngineOptions")
      .def(py::init<>())
      .def_readwrite("device", &engine::EngineOptions::device)
      .def_readwrite("gradient_scale", &engine::EngineOptions::gradient_scale)
      .def_readwrite("host_replicates", &engine::EngineOptions::host_replicates)
      .def_readwrite("step", &engine::EngineOptions::step);

  py::class_<UnitSpec>(module, "UnitSpec")
      .def(py::init([](std::string name, at::ScalarType compute_dtype, at::ScalarType reduce_dtype,
                       bool host) {
             return UnitSpec{std::move(name), compute_dtype, reduce_dtype, host};
           }),
           py::arg("name"), py::arg("compute_dtype"), py::arg("reduce_dtype"), py::arg("host"));

  py::class_<Verdict>(module, "Verdict")
      .def_readonly("has_gradient", &Verdict::has_gradient)
      .def("norm", &Verdict::norm)
      .def("norms", &Verdict::norms)
      .def("finite", &Verdict::finite);
}

void add_construction(EngineClass& engine) {
  engine
      .def(py::init(&Engine::make), py::arg("options"), py::arg("mesh"), py::arg("plan"),
           py::arg("units"), py::arg("sizes"))
      .def(
          "weights", [](Engine& e, UnitIndex unit) { return e.unit(unit).weight_tensors(); },
          py::arg("unit"))
      .def(
          "parameters_of",
          [](const Engine& e, LeafIndex leaf) { return e.leaves().at(leaf).parameters; },
          py::arg("leaf"))
      .def(
          "packed_order",
          [](Engine& e, UnitIndex unit) {
            std::vector<LeafIndex> order;
            for (const layout::PackedLeaf& leaf : e.unit(unit).packing().leaves)
              order.push_back(leaf.index);
            return order;
          },
          py::arg("unit"))
      .def("bind", &Engine::bind, py::arg("unit"), py::arg("parameters"))
      .def("set_placeholders", &Engine::set_placeholders, py::arg("placeholders"),
           py::arg("gradients"));
}

void add_hooks(EngineClass& engine) {
  const NoGil no_gil;
  engine.def("begin_forward", &Engine::begin_forward, no_gil)
      .def("end_forward", &Engine::end_forward)
      .def("before_forward", &Engine::before_forward, py::arg("unit"), no_gil)
      .def("after_forward", &Engine::after_forward, py::arg("unit"), no_gil)
      .def("watch_inputs", &Engine::watch_inputs, py::arg("unit"), py::arg("inputs"))
      .def("watch_outputs", &Engine::watch_outputs, py::arg("unit"), py::arg("outputs"))
      .def("watch_root_outputs", &Engine::watch_root_outputs, py::arg("outputs"))
      .def("refuse_backward", &Engine::refuse_backward, py::arg("why"));
}

void add_step(EngineClass& engine) {
  const NoGil no_gil;
  engine
      .def(
          "agree",
          [](Engine& e, const std::optional<at::Tensor>& host, std::uint32_t settings) {
            return e.agree(host.value_or(at::Tensor()), settings);
          },
          py::arg("host"), py::arg("settings"), no_gil)
      .def("agreed", &Engine::agreed)
      .def("end_step", &Engine::end_step)
      .def("forget_verdict", &Engine::forget_verdict)
      .def("scale_gradients", &Engine::scale_gradients, py::arg("factor"), no_gil)
      .def("scale_gradient", &Engine::scale_gradient, py::arg("leaf"), py::arg("factor"), no_gil)
      .def("publish", &Engine::publish, no_gil)
      .def("clear_gradient", &Engine::clear_gradient, py::arg("leaf"), no_gil)
      .def("leave", &Engine::leave, py::arg("what"), no_gil)
      .def("meet", &Engine::meet, py::arg("call"), no_gil)
      .def_property_readonly("num_backwards", &Engine::num_backwards)
      .def("host_holds_sums", [](Engine& e) { return e.host_sums().held(); })
      .def("forget_host_sums", [](Engine& e) { e.host_sums().forget(); })
      .def("drain", &Engine::drain, no_gil)
      .def("settle", &Engine::settle, no_gil)
      .def("settle_step", &Engine::settle_step, no_gil);
}

void add_owned_tensors(EngineClass& engine) {
  const NoGil no_gil;
  engine
      .def(
          "add_owned",
          [](Engine& e, const std::string& name, bool a_row) {
            e.owned().add(name, a_row ? wire::a_value_a_row : wire::MatrixSizes());
          },
          py::arg("name"), py::arg("a_row") = false)
      .def(
          "owned_sizes",
          [](Engine& e, LeafIndex leaf, const std::string& name) {
            return e.owned().sizes_of(e.leaves().at(leaf), name);
          },
          py::arg("leaf"), py::arg("name"))
      .def(
          "remove_owned", [](Engine& e, const std::string& name) { e.owned().remove(name); },
          py::arg("name"))
      .def(
          "owned_parts",
          [](Engine& e, LeafIndex leaf, const std::string& name) {
            using Part = std::tuple<core::ParameterIndex, std::int64_t, std::int64_t, at::Tensor>;
            std::vector<Part> parts;
            for (const Engine::OwnedPart& part : e.owned_parts(leaf, name))
              parts.emplace_back(part.parameter, part.elements.begin, part.elements.end,
                                 part.tensor);
            return parts;
          },
          py::arg("leaf"), py::arg("name"))
      .def("gather", &Engine::gather, py::arg("leaf"), py::arg("name"), no_gil)
      .def("scatter", &Engine::scatter, py::arg("leaf"), py::arg("name"), py::arg("value"), no_gil)
      .def("to_shards", &Engine::to_shards, py::arg("which"), py::arg("name"), py::arg("dtype"),
           no_gil)
      .def("from_shards", &Engine::from_shards, py::arg("which"), py::arg("name"),
           py::arg("shards"), no_gil);
}

// One unit's operations by themselves, for verification.
void add_operations(EngineClass& engine) {
  const NoGil no_gil;
  engine.def("unshard", &Engine::unshard, py::arg("unit"), no_gil)
      .def("reshard", &Engine::reshard, py::arg("unit"), no_gil)
      .def("route", &Engine::route, py::arg("unit"), no_gil)
      .def("put_gradient", &Engine::put_gradient, py::arg("leaf"), py::arg("value"), no_gil)
      .def("ready", &Engine::ready, py::arg("unit"))
      .def("set_sync", &Engine::set_sync, py::arg("sync"));
}

void add_inspection(EngineClass& engine) {
  const NoGil no_gil;
  engine.def("layout", &Engine::layout)
      .def("trace", &Engine::trace, py::arg("of_pass"))
      .def(
          "messages_of",
          [](const Engine& e, const schedule::Operation& operation, int slot) {
            return schedule::messages_of(operation, e.layout(), core::Slot(slot));
          },
          py::arg("operation"), py::arg("slot"))
      .def(
          "start_profile", [](Engine& e) { e.profile().start(); }, no_gil)
      .def("now", [](Engine& e) { return e.profile().clock().now(); })
      .def(
          "seconds",
          [](Engine& e, const wire::Instant& instant) {
            return e.profile().clock().seconds(instant);
          },
          py::arg("instant"), no_gil)
      .def("stop_profile",
           [](Engine& e) {
             using Row =
                 std::tuple<std::string, std::string, schedule::Subject, double, double, double>;
             std::vector<Row> rows;
             const auto spans = [&] {
               const py::gil_scoped_release released;
               return e.profile().stop();
             }();
             for (const engine::Span& s : spans) {
               rows.emplace_back(schedule::name_of(s.kind),
                                 schedule::name_of(schedule::lane_of(s.kind)), s.subject, s.issued,
                                 s.started, s.done);
             }
             return rows;
           })
      .def("statistics", &Engine::statistics)
      .def("reset_peak", &Engine::reset_peak);
}

}  // namespace

void init_engine(py::module_& module) {
  init_mesh(module);
  init_settings(module);
  // A class without functions.
  py::class_<wire::Instant>(module, "Instant");  // NOLINT(bugprone-unused-raii)

  EngineClass engine(module, "Engine");
  add_construction(engine);
  add_hooks(engine);
  add_step(engine);
  add_owned_tensors(engine);
  add_operations(engine);
  add_inspection(engine);
  module.def("in_backward", &engine::in_backward);
}

}  // namespace dmuon::bindings
