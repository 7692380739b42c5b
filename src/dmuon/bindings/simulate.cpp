#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"
#include "dmuon/core/error.h"
#include "dmuon/simulate/execution.h"

namespace dmuon::bindings {
namespace py = pybind11;
using simulate::Compute;
using simulate::Issue;
using simulate::Job;
using simulate::Program;
using simulate::TrainingEvent;

namespace {

/// Durations for a picture whose unit of time is the forward of a unit.
class Relative : public simulate::Durations {
 public:
  Relative(double forward, double backward, double prepare, double orthogonalise, double apply,
           double row_byte, double column_byte)
      : forward_(forward),
        backward_(backward),
        prepare_(prepare),
        orthogonalise_(orthogonalise),
        apply_(apply),
        row_byte_(row_byte),
        column_byte_(column_byte) {}

  double work_us(core::Owner, const Issue& issue) override {
    if (issue.compute) return issue.is(Compute::kForward) ? forward_ : backward_;
    if (issue.is(schedule::Kind::kOrthogonalise)) return orthogonalise_;
    const bool begins = issue.is(schedule::Kind::kPrepare) || issue.is(schedule::Kind::kGather);
    return begins ? prepare_ : apply_;
  }
  double message_us(core::Owner, const Issue&, const schedule::Message& sent) override {
    const bool row = sent.axis == layout::Axis::kRow;
    return static_cast<double>(sent.bytes) * (row ? row_byte_ : column_byte_);
  }

 private:
  double forward_, backward_, prepare_, orthogonalise_, apply_, row_byte_, column_byte_;
};

void init_job(py::module_& module) {
  py::enum_<TrainingEvent::What>(module, "TrainingEvent")
      .value("TRAIN_FORWARD", TrainingEvent::What::kTrainForward)
      .value("EVALUATION", TrainingEvent::What::kEvaluation)
      .value("BACKWARD", TrainingEvent::What::kBackward)
      .value("BACKWARD_NO_SYNC", TrainingEvent::What::kBackwardNoSync)
      .value("STEP", TrainingEvent::What::kStep);

  py::class_<Job>(module, "Job")
      .def(py::init([](schedule::Layout layout, const schedule::StepOptions& options,
                       schedule::Trace forward, schedule::Trace backward,
                       core::Vector<core::Slot, schedule::Batches> batches,
                       const std::vector<TrainingEvent::What>& events) {
             std::vector<TrainingEvent> all;
             for (const TrainingEvent::What what : events) all.push_back({what});
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
}

void init_programs(py::module_& module) {
  py::class_<Issue>(module, "Issue")
      .def_readonly("operation", &Issue::operation)
      .def_property_readonly("kind",
                             [](const Issue& issue) -> std::string {
                               if (issue.compute)
                                 return issue.is(Compute::kForward) ? "forward" : "backward";
                               return schedule::name_of(issue.operation.kind);
                             })
      .def_property_readonly(
          "lane", [](const Issue& issue) { return std::string(schedule::name_of(issue.lane())); })
      .def_readonly("event", &Issue::event)
      .def_property_readonly("trigger", [](const Issue& issue) {
        return issue.crossing ? std::optional(issue.crossing->trigger) : std::nullopt;
      });

  py::class_<Program>(module, "Program").def_readonly("issues", &Program::issues);

  py::class_<simulate::SimulatedSpan>(module, "SimulatedSpan")
      .def_readonly("issue", &simulate::SimulatedSpan::issue)
      .def_readonly("issued_us", &simulate::SimulatedSpan::issued_us)
      .def_readonly("start_us", &simulate::SimulatedSpan::start_us)
      .def_readonly("end_us", &simulate::SimulatedSpan::end_us);
}

}  // namespace

void init_simulate(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  init_job(module);
  init_programs(module);
  module.def("unroll", &simulate::unroll, py::arg("job"), no_gil);
  module.def(
      "execute",
      [](const simulate::Programs& programs, double forward, double backward, double prepare,
         double orthogonalise, double apply, double row_byte, double column_byte) {
        Relative durations(forward, backward, prepare, orthogonalise, apply, row_byte, column_byte);
        simulate::Execution run = simulate::execute(programs, durations);
        core::invariant(run.violations.empty(), "execute: ", core::joined(run.violations));
        return std::move(run.timeline);
      },
      py::arg("programs"), py::kw_only(), py::arg("forward"), py::arg("backward"),
      py::arg("prepare"), py::arg("orthogonalise"), py::arg("apply"), py::arg("row_byte"),
      py::arg("column_byte"), no_gil);
}

}  // namespace dmuon::bindings
