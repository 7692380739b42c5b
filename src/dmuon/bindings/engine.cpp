#include "dmuon/engine/engine.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
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
using engine::Transfers;
using engine::UnitSpec;
using engine::Verdict;
using wire::SharedMesh;

namespace {

using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;
using NoGil = py::call_guard<py::gil_scoped_release>;
// A part of the engine, which it keeps alive.
constexpr auto kInside = py::return_value_policy::reference_internal;

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
      .def_readonly("has_open_gradients", &Verdict::has_open_gradients)
      .def_readonly("maxima", &Verdict::maxima)
      .def("norm", &Verdict::norm)
      .def("norms", &Verdict::norms)
      .def("squared_norms_of_ranks", &Verdict::squared_norms_of_ranks)
      .def("squared_norms_of_copies", &Verdict::squared_norms_of_copies)
      .def("finite", &Verdict::finite);
}

void init_parts(py::module_& module) {
  const NoGil no_gil;
  py::class_<layout::Leaf>(module, "Leaf").def_readonly("parameters", &layout::Leaf::parameters);
  py::class_<layout::PackedLeaf>(module, "PackedLeaf")
      .def_readonly("index", &layout::PackedLeaf::index);
  py::class_<layout::Packing>(module, "Packing").def_readonly("leaves", &layout::Packing::leaves);
  py::class_<engine::Unit>(module, "Unit")
      .def("packing", &engine::Unit::packing, kInside)
      .def("weight_tensors", &engine::Unit::weight_tensors);

  py::class_<layout::Cut>(module, "Cut")
      .def(py::init<int, int>(), py::arg("dimension"), py::arg("factor") = 1);

  py::class_<engine::Call, std::shared_ptr<engine::Call>>(module, "Call")
      .def(py::init([](bool reader, bool nested) {
             return engine::Call{.reader = reader, .nested = nested};
           }),
           py::arg("reader"), py::arg("nested"));

  py::class_<engine::HostSums>(module, "HostSums")
      .def("held", &engine::HostSums::held)
      .def("forget", &engine::HostSums::forget);

  py::class_<wire::Owned>(module, "Owned")
      .def(
          "add", [](wire::Owned& owned, const std::string& name) { owned.add(name); },
          py::arg("name"))
      .def("remove", &wire::Owned::remove, py::arg("name"))
      .def("has_name", &wire::Owned::has_name, py::arg("name"));

  py::class_<layout::Segment>(module, "Segment")
      .def_readonly("begin", &layout::Segment::begin)
      .def_readonly("end", &layout::Segment::end);
  py::class_<Transfers::OwnedPart>(module, "OwnedPart")
      .def_readonly("parameter", &Transfers::OwnedPart::parameter)
      .def_readonly("elements", &Transfers::OwnedPart::elements)
      .def_readonly("tensor", &Transfers::OwnedPart::tensor);

  py::class_<Transfers>(module, "Transfers")
      .def("sizes_of", &Transfers::sizes_of, py::arg("leaf"), py::arg("name"))
      .def("rows_of", &Transfers::rows_of, py::arg("leaf"), py::arg("name"))
      .def("gather", &Transfers::gather, py::arg("leaf"), py::arg("name"), no_gil)
      .def("scatter", &Transfers::scatter, py::arg("leaf"), py::arg("name"), py::arg("value"),
           no_gil)
      .def("owned_parts", &Transfers::owned_parts, py::arg("leaf"), py::arg("name"), no_gil)
      .def("to_shards", &Transfers::to_shards, py::arg("which"), py::arg("name"), py::arg("dtype"),
           no_gil)
      .def("from_shards", &Transfers::from_shards, py::arg("which"), py::arg("name"),
           py::arg("shards"), no_gil);
}

void init_profile(py::module_& module) {
  const NoGil no_gil;
  // A class without functions.
  py::class_<wire::Instant>(module, "Instant");  // NOLINT(bugprone-unused-raii)
  py::class_<wire::Clock>(module, "Clock")
      .def("now", &wire::Clock::now)
      .def("seconds", &wire::Clock::seconds, py::arg("instant"), no_gil);

  using engine::Span;
  py::class_<Span>(module, "Span")
      .def_property_readonly("kind", [](const Span& s) { return schedule::name_of(s.kind); })
      .def_property_readonly(
          "lane", [](const Span& s) { return schedule::name_of(schedule::lane_of(s.kind)); })
      .def_readonly("subject", &Span::subject)
      .def_readonly("issued", &Span::issued)
      .def_readonly("started", &Span::started)
      .def_readonly("done", &Span::done);

  py::class_<engine::Profile>(module, "Profile")
      .def("clock", &engine::Profile::clock, kInside)
      .def("start", &engine::Profile::start, no_gil)
      .def("stop", &engine::Profile::stop, no_gil);
}

// The destructor waits for updates that are at work. A user's rule in one needs the GIL; and if the
// rule itself frees the engine, as a collection of garbage inside of it may, another thread waits.
std::shared_ptr<Engine> freed_without_gil(std::shared_ptr<Engine> made) {
  Engine* const engine = made.get();
  return {engine, [made = std::move(made)](Engine* /*engine*/) mutable {
            if (wire::Lane::is_in_thread())
              return std::thread([last = std::move(made)]() mutable { last.reset(); }).detach();
            if (PyGILState_Check() == 0) return made.reset();
            const py::gil_scoped_release no_gil;
            made.reset();
          }};
}

void add_construction(EngineClass& engine) {
  const NoGil no_gil;
  engine
      .def(py::init([](const engine::EngineOptions& options, const SharedMesh& mesh,
                       const plan::Plan& plan, const std::vector<UnitSpec>& units,
                       const layout::LeafSizes& sizes, const layout::Cuts& cuts) {
             auto made = freed_without_gil(Engine::make(options, mesh, plan, units, sizes, cuts));
             made->keep_in_graphs(made);
             return made;
           }),
           py::arg("options"), py::arg("mesh"), py::arg("plan"), py::arg("units"), py::arg("sizes"),
           py::arg("cuts"))
      .def("leaves", &Engine::leaves)
      .def(
          "num_elements",
          [](const Engine& e, core::ParameterIndex parameter, int tensor_rank) {
            return e.sliced().empty() ? e.parameters().at(parameter).num_elements()
                                      : e.sliced().at(parameter).num_elements(tensor_rank);
          },
          py::arg("parameter"), py::arg("tensor_rank"))
      .def("unit", &Engine::unit, py::arg("index"), kInside)
      .def("bind", &Engine::bind, py::arg("unit"), py::arg("parameters"),
           py::arg_v("to_local", engine::Unit::ToLocal(), "..."), no_gil)
      .def("owned", &Engine::owned, kInside)
      .def("transfers", &Engine::transfers, kInside)
      .def(
          "set_placeholders",
          [](Engine& e, engine::Placeholders::Tensors placeholders,
             engine::Placeholders::Tensors gradients) {
            e.placeholders().set(std::move(placeholders), std::move(gradients));
          },
          py::arg("placeholders"), py::arg("gradients"));
}

void add_hooks(EngineClass& engine) {
  const NoGil no_gil;
  engine.def("begin_forward", &Engine::begin_forward, no_gil)
      .def("end_forward", &Engine::end_forward, no_gil)
      .def("before_forward", &Engine::before_forward, py::arg("unit"), py::arg("reader") = false,
           no_gil)
      .def("after_forward", &Engine::after_forward, py::arg("unit"), py::arg("reader") = false,
           no_gil)
      .def("forget_call", &Engine::forget_call, py::arg("unit"))
      .def("watch_inputs", &Engine::watch_inputs, py::arg("unit"), py::arg("inputs"),
           py::arg("call"), py::arg("before_end"), no_gil)
      .def("watch_outputs", &Engine::watch_outputs, py::arg("unit"), py::arg("outputs"),
           py::arg("call"))
      .def("watch_root_outputs", &Engine::watch_root_outputs, py::arg("outputs"))
      .def("before_end_of_backward", &Engine::before_end_of_backward, py::arg("callback"))
      .def(
          "set_other_gradients",
          [](Engine& e, std::function<void(int)> send_early, std::function<void(bool)> average) {
            e.other_gradients() = {std::move(send_early), std::move(average)};
          },
          py::arg("send_early"), py::arg("average"))
      .def(
          "set_other_places",
          [](Engine& e, std::set<int> places) { e.other_gradients().places = std::move(places); },
          py::arg("places"))
      .def("num_crossed", &Engine::num_crossed)
      .def("in_synchronised_backward", &Engine::in_synchronised_backward)
      .def("move_out", &Engine::move_out, no_gil)
      .def("move_back", &Engine::move_back, no_gil)
      .def("take_back", &Engine::take_back, py::arg("unit"), py::arg("checksum"), no_gil)
      .def("refuse_backward", &Engine::refuse_backward, py::arg("why"));
}

void add_step(EngineClass& engine) {
  const NoGil no_gil;
  engine
      .def(
          "agree",
          [](Engine& e, const std::optional<at::Tensor>& host, std::uint32_t settings,
             const std::optional<at::Tensor>& maxima, bool has_open_gradients) {
            return e.agree(host.value_or(at::Tensor()), settings, maxima.value_or(at::Tensor()),
                           has_open_gradients);
          },
          py::arg("host"), py::arg("settings"), py::arg("maxima") = std::nullopt,
          py::arg("has_open_gradients") = false, no_gil)
      .def("set_num_maxima", &Engine::set_num_maxima, py::arg("num_maxima"))
      .def("verdict",
           [](const Engine& e) { return e.verdict() ? std::optional(*e.verdict()) : std::nullopt; })
      .def("end_step", &Engine::end_step)
      .def("forget_verdict", &Engine::forget_verdict)
      .def("scale_gradients", &Engine::scale_gradients, py::arg("factor"), no_gil)
      .def("scale_gradient", &Engine::scale_gradient, py::arg("leaf"), py::arg("factor"), no_gil)
      .def("publish", &Engine::publish, no_gil)
      .def("compute_with", &Engine::compute_with, py::arg("name"), py::arg("call"), no_gil)
      .def("clear_gradient", &Engine::clear_gradient, py::arg("leaf"), no_gil)
      .def("zero_gradient", &Engine::zero_gradient, py::arg("leaf"), no_gil)
      .def_property_readonly("mesh", [](Engine& e) { return e.mesh(); })
      .def("leave", &Engine::leave, py::arg("what"), no_gil)
      .def("meet", &Engine::meet, py::arg("call"), no_gil)
      .def_property_readonly("num_backwards", &Engine::num_backwards)
      .def_property_readonly("last_anew", &Engine::last_anew)
      .def_property_readonly("backward_number", &Engine::backward_number)
      .def("host_sums", &Engine::host_sums, kInside)
      .def("drain", &Engine::drain, no_gil)
      .def("finish_update", &Engine::finish_update, no_gil)
      .def("remove_owned", &Engine::remove_owned, py::arg("name"))
      .def("settle", &Engine::settle, no_gil)
      .def("end_failed_backward", &Engine::end_failed_backward, no_gil)
      .def("settle_step", &Engine::settle_step, no_gil);
}

// One unit's operations by themselves, for verification.
void add_operations(EngineClass& engine) {
  const NoGil no_gil;
  engine.def("unshard", &Engine::unshard, py::arg("unit"), no_gil)
      .def("reshard", &Engine::reshard, py::arg("unit"), no_gil)
      .def("route", &Engine::route, py::arg("unit"), no_gil)
      .def("put_gradient", &Engine::put_gradient, py::arg("leaf"), py::arg("value"), no_gil)
      .def("ready", &Engine::ready, py::arg("unit"))
      .def("set_sync", &Engine::set_sync, py::arg("sync"), no_gil);
}

void add_inspection(EngineClass& engine) {
  engine.def("layout", &Engine::layout)
      .def("trace", &Engine::trace, py::arg("of_pass"))
      .def("profile", &Engine::profile, kInside)
      .def("statistics", &Engine::statistics)
      .def("reset_peak", &Engine::reset_peak);
}

}  // namespace

void init_engine(py::module_& module) {
  init_settings(module);
  init_parts(module);
  init_profile(module);

  EngineClass engine(module, "Engine");
  add_construction(engine);
  add_hooks(engine);
  add_step(engine);
  add_operations(engine);
  add_inspection(engine);
  module.def("in_backward", &engine::in_backward);
  module.def("refuse_in_update", &Engine::refuse_in_update);
  module.attr("LEAVING_BACKWARD") = engine::kLeavingBackward;
  module.def("on_skipped_gradient", &engine::on_skipped_gradient, py::arg("output"),
             py::arg("callback"));
  module.def("accumulate_into", &engine::accumulate_into, py::arg("parameter"),
             py::arg("placeholder"));
}

}  // namespace dmuon::bindings
