#include <pybind11/stl.h>

#include <string>

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"
#include "dmuon/schedule/step_schedule.h"
#include "dmuon/schedule/trigger.h"

namespace dmuon::bindings {
namespace py = pybind11;
using schedule::Dependency;
using schedule::Message;
using schedule::Operation;
using schedule::Trigger;

void init_schedule(py::module_& module) {
  py::enum_<schedule::Moment>(module, "Moment")
      .value("BEFORE_USE", schedule::Moment::kBeforeUse)
      .value("AFTER_FORWARD", schedule::Moment::kAfterForward)
      .value("AFTER_BACKWARD", schedule::Moment::kAfterBackward);

  py::enum_<schedule::Pass>(module, "Pass")
      .value("TRAIN_FORWARD", schedule::Pass::kTrainForward)
      .value("EVAL_FORWARD", schedule::Pass::kEvalForward)
      .value("BACKWARD", schedule::Pass::kBackward);

  py::class_<Trigger>(module, "Trigger")
      .def_readonly("moment", &Trigger::moment)
      .def_readonly("unit", &Trigger::unit);

  py::class_<Dependency>(module, "Dependency")
      .def_property_readonly(
          "kind", [](const Dependency& d) { return std::string(schedule::name_of(d.kind)); })
      .def_readonly("subject", &Dependency::subject);

  py::class_<Operation>(module, "Operation")
      .def_property_readonly(
          "kind", [](const Operation& o) { return std::string(schedule::name_of(o.kind)); })
      .def_property_readonly("lane",
                             [](const Operation& o) {
                               return std::string(schedule::name_of(schedule::lane_of(o.kind)));
                             })
      .def_readonly("subject", &Operation::subject)
      .def_readonly("version", &Operation::version)
      .def_readonly("after", &Operation::after);

  // A class without functions.
  py::class_<schedule::Layout>(module, "Layout");  // NOLINT(bugprone-unused-raii)

  py::class_<Message>(module, "Message")
      .def_property_readonly(
          "group", [](const Message& m) { return m.axis == layout::Axis::kRow ? "row" : "column"; })
      .def_readonly("root", &Message::root)
      .def_readonly("bytes", &Message::bytes);
  module.def("messages_of", &schedule::messages_of, py::arg("operation"), py::arg("layout"),
             py::arg("slot"));
}

}  // namespace dmuon::bindings
