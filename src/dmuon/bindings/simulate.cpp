#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"
#include "dmuon/simulate/dry_run.h"

namespace dmuon::bindings {
namespace py = pybind11;
using simulate::Costs;
using simulate::DryRun;
using simulate::Event;
using simulate::Issue;
using simulate::Job;
using simulate::Program;

void init_simulate(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::enum_<Event::What>(module, "Event")
      .value("TRAIN_FORWARD", Event::What::kTrainForward)
      .value("EVALUATION", Event::What::kEvaluation)
      .value("BACKWARD", Event::What::kBackward)
      .value("BACKWARD_NO_SYNC", Event::What::kBackwardNoSync)
      .value("STEP", Event::What::kStep);

  py::class_<Job>(module, "Job")
      .def(py::init([](schedule::Layout layout, const schedule::StepOptions& options,
                       schedule::Trace forward, schedule::Trace backward,
                       core::Vector<core::Slot, schedule::Batches> batches,
                       const std::vector<Event::What>& events) {
             std::vector<Event> all;
             for (const Event::What what : events) all.push_back({what});
             return Job{.layout = std::move(layout),
                        .options = options,
                        .forward = std::move(forward),
                        .backward = std::move(backward),
                        .evaluation = {},
                        .batches = std::move(batches),
                        .events = std::move(all),
                        .skips = {}};
           }),
           py::arg("layout"), py::arg("options"), py::arg("forward"), py::arg("backward"),
           py::arg("batches"), py::arg("events"));

  py::class_<Issue>(module, "Issue")
      .def_readonly("operation", &Issue::operation)
      .def_readonly("event", &Issue::event)
      .def_property_readonly("trigger", [](const Issue& issue) {
        return issue.crossing ? std::optional(issue.crossing->trigger) : std::nullopt;
      });

  py::class_<Program>(module, "Program").def_readonly("issues", &Program::issues);

  py::class_<Costs>(module, "Costs")
      .def(py::init([](double forward_us, double backward_us, double update_us,
                       double row_us_per_byte, double column_us_per_byte) {
             return Costs{forward_us, backward_us, update_us, row_us_per_byte, column_us_per_byte};
           }),
           py::arg("forward_us"), py::arg("backward_us"), py::arg("update_us"),
           py::arg("row_us_per_byte"), py::arg("column_us_per_byte"));

  py::class_<simulate::Span>(module, "SimulatedSpan")
      .def_readonly("issue", &simulate::Span::issue)
      .def_readonly("issued_us", &simulate::Span::issued_us)
      .def_readonly("start_us", &simulate::Span::start_us)
      .def_readonly("end_us", &simulate::Span::end_us);

  py::class_<DryRun>(module, "DryRun")
      .def_readonly("violations", &DryRun::violations)
      .def_readonly("timeline", &DryRun::timeline)
      .def_readonly("peak_bytes", &DryRun::peak_bytes);

  module.def("unroll", &simulate::unroll, py::arg("job"), no_gil);
  module.def(
      "dry_run",
      [](const Job& job, const Costs& costs) { return simulate::dry_run(job, {.costs = costs}); },
      py::arg("job"), py::arg("costs"), no_gil);
}

}  // namespace dmuon::bindings
