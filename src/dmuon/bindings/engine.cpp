#include "dmuon/engine/engine.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"
#include "dmuon/engine/autograd.h"

namespace dmuon::bindings {
namespace py = pybind11;
using engine::Engine;
using engine::Group;
using engine::Groups;
using engine::HostNorms;
using engine::MatrixSpec;
using engine::Options;
using engine::UnitSpec;
using engine::Verdict;

void init_engine(py::module_& module) {
  using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<schedule::Options>(module, "ScheduleOptions")
      .def(py::init<>())
      .def_readwrite("node_copy", &schedule::Options::node_copy)
      .def_readwrite("lookahead", &schedule::Options::lookahead)
      .def_readwrite("max_units_in_flight", &schedule::Options::max_units_in_flight)
      .def_readwrite("broadcast_before_reduce", &schedule::Options::broadcast_before_reduce)
      .def_readwrite("asynchronous", &schedule::Options::asynchronous);

  py::class_<Options>(module, "Options")
      .def(py::init<>())
      .def_readwrite("num_replicates", &Options::num_replicates)
      .def_readwrite("num_shards", &Options::num_shards)
      .def_readwrite("replicate", &Options::replicate)
      .def_readwrite("shard", &Options::shard)
      .def_readwrite("device", &Options::device)
      .def_readwrite("host_replicates", &Options::host_replicates)
      .def_readwrite("schedule", &Options::schedule)
      .def_readwrite("reshard_after_forward", &Options::reshard_after_forward);

  py::class_<Group>(module, "Group")
      .def(py::init<ProcessGroup, std::string, int, int>(), py::arg("group").none(true),
           py::arg("name"), py::arg("rank"), py::arg("size"));

  py::class_<Groups>(module, "Groups")
      .def(py::init([](Group row, Group column, Group order, Group verdict) {
             return Groups{std::move(row), std::move(column), std::move(order), std::move(verdict)};
           }),
           py::arg("row"), py::arg("column"), py::arg("order"), py::arg("verdict"))
      .def(
          "leave",
          [](Groups& groups, int grace_ms) { groups.leave(std::chrono::milliseconds(grace_ms)); },
          py::arg("grace_ms"), no_gil);

  py::class_<MatrixSpec>(module, "MatrixSpec")
      .def(py::init([](std::int64_t rows, std::int64_t cols, int unit, int owner) {
             return MatrixSpec{rows, cols, unit, owner};
           }),
           py::arg("rows"), py::arg("cols"), py::arg("unit"), py::arg("owner"));

  py::class_<UnitSpec>(module, "UnitSpec")
      .def(py::init([](std::string name, std::vector<int> matrices, at::ScalarType compute_dtype,
                       at::ScalarType reduce_dtype) {
             return UnitSpec{std::move(name), std::move(matrices), compute_dtype, reduce_dtype};
           }),
           py::arg("name"), py::arg("matrices"), py::arg("compute_dtype"), py::arg("reduce_dtype"));

  py::class_<HostNorms>(module, "HostNorms")
      .def(py::init([](double sharded, double replicated) {
             return HostNorms{sharded, replicated};
           }),
           py::arg("sharded"), py::arg("replicated"));

  py::class_<Verdict>(module, "Verdict")
      .def_readonly("finite", &Verdict::finite)
      .def_readonly("has_gradient", &Verdict::has_gradient)
      .def_readonly("squared_norms", &Verdict::squared_norms)
      .def_readonly("host_squared_norm", &Verdict::host_squared_norm);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init<Options, Groups, std::vector<MatrixSpec>, const std::vector<UnitSpec>&,
                    const std::vector<std::vector<int>>&>(),
           py::arg("options"), py::arg("groups"), py::arg("specs"), py::arg("units"),
           py::arg("batches"))
      .def(
          "views", [](Engine& e, int unit) { return e.unit(unit).views(); }, py::arg("unit"))
      .def(
          "packed_order", [](Engine& e, int unit) { return e.unit(unit).packing().matrices; },
          py::arg("unit"))
      .def("bind", &Engine::bind, py::arg("unit"), py::arg("parameters"))
      .def("set_placeholders", &Engine::set_placeholders, py::arg("placeholders"),
           py::arg("gradients"))
      .def("begin_forward", &Engine::begin_forward, no_gil)
      .def("before_forward", &Engine::before_forward, py::arg("unit"), no_gil)
      .def("after_forward", &Engine::after_forward, py::arg("unit"), no_gil)
      .def("watch_inputs", &Engine::watch_inputs, py::arg("unit"), py::arg("inputs"))
      .def("watch_outputs", &Engine::watch_outputs, py::arg("unit"), py::arg("outputs"))
      .def("watch_root_outputs", &Engine::watch_root_outputs, py::arg("outputs"))
      .def("agree", &Engine::agree, py::arg("host"), py::arg("settings"), no_gil)
      .def("agreed", &Engine::agreed)
      .def("forget_verdict", &Engine::forget_verdict)
      .def("scale_verdict", &Engine::scale_verdict, py::arg("factor"))
      .def("publish", &Engine::publish, no_gil)
      .def("clear_gradient", &Engine::clear_gradient, py::arg("matrix"), no_gil)
      .def("drain", &Engine::drain, no_gil)
      .def("settle", &Engine::settle, no_gil)
      .def("settle_step", &Engine::settle_step, no_gil)
      .def("collect_master", &Engine::collect_master, py::arg("matrix"), no_gil)
      .def("unshard", &Engine::unshard, py::arg("unit"), no_gil)
      .def("reshard", &Engine::reshard, py::arg("unit"), no_gil)
      .def("route", &Engine::route, py::arg("unit"), no_gil)
      .def("put_gradient", &Engine::put_gradient, py::arg("unit"), py::arg("matrix"),
           py::arg("value"))
      .def("ready", &Engine::ready, py::arg("unit"))
      .def("set_sync", &Engine::set_sync, py::arg("sync"))
      .def("holds_partial_sums", &Engine::holds_partial_sums)
      .def("schedule", [](const Engine& e) { return e.schedule(); })
      .def("trace", &Engine::trace, py::arg("of_pass"))
      .def(
          "messages_of",
          [](const Engine& e, const schedule::Operation& operation, int slot) {
            return schedule::messages_of(operation, e.layout(), core::Slot(slot));
          },
          py::arg("operation"), py::arg("slot"))
      .def("start_profile", [](Engine& e) { e.profile().start(); })
      .def("stop_profile",
           [](Engine& e) {
             using Row = std::tuple<std::string, std::string, int, double, double, double>;
             std::vector<Row> rows;
             for (const engine::Span& s : e.profile().stop()) {
               rows.emplace_back(schedule::name_of(s.kind),
                                 schedule::name_of(schedule::lane_of(s.kind)), s.unit, s.issued,
                                 s.started, s.done);
             }
             return rows;
           })
      .def("statistics", &Engine::statistics)
      .def("reset_peak", &Engine::reset_peak);

  module.def("in_backward", &engine::in_backward);
}

}  // namespace dmuon::bindings
