#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/bindings/topics.h"
#include "dmuon/predict/owned.h"
#include "dmuon/predict/prediction.h"

namespace dmuon::bindings {
namespace py = pybind11;
using predict::Prediction;

namespace {

template <typename Enum, typename T, int kSize>
std::map<std::string, T> by_name(const core::ByEnum<Enum, T, kSize>& values) {
  std::map<std::string, T> named;
  for (const Enum one : core::EachOf<Enum, kSize>{}) named[name_of(one)] = values[one];
  return named;
}

std::map<std::string, std::map<std::string, double>> waits_of(const Prediction& prediction) {
  std::map<std::string, std::map<std::string, double>> waits;
  for (const predict::Phase phase : predict::kPhases)
    waits[name_of(phase)] = by_name(prediction.waits_ms[phase]);
  return waits;
}

predict::Contender contender_of(const std::string& name) {
  std::string known;
  for (const predict::Contender one : predict::kContenders) {
    if (name == name_of(one)) return one;
    known += std::string(known.empty() ? "" : ", ") + name_of(one);
  }
  throw core::InvalidArgument("predict: contender: expected one of " + known + "; got '" + name +
                              "'");
}

void init_rates(py::module_& module) {
  py::class_<plan::Network>(module, "Network", "What connects nodes.")
      .def(py::init([](std::string name, double gb_per_s, double latency_us, bool per_device) {
             return plan::Network{std::move(name), "", "", gb_per_s, latency_us, per_device};
           }),
           py::arg("name"), py::arg("gb_per_s"), py::arg("latency_us"), py::arg("per_device"))
      .def_readonly("name", &plan::Network::name)
      .def_readwrite("gb_per_s", &plan::Network::gb_per_s)
      .def_readonly("latency_us", &plan::Network::latency_us)
      .def_readonly("per_device", &plan::Network::per_device);
  py::class_<plan::Device>(module, "Device", "A device's rates.")
      .def_readonly("name", &plan::Device::name)
      .def_readonly("description", &plan::Device::description)
      .def_readonly("network", &plan::Device::network)
      .def_readonly("memory_gb", &plan::Device::memory_gb)
      .def_readwrite("elementwise_gb_per_s", &plan::Device::elementwise_gb_per_s)
      .def_readwrite("link_gb_per_s", &plan::Device::link_gb_per_s)
      .def_readwrite("launch_us", &plan::Device::launch_us)
      .def_readwrite("training_tflops", &plan::Device::training_tflops);
  module.def("device", &catalog::device, py::arg("name"));
  module.def("network", &catalog::network, py::arg("name"));
}

}  // namespace

void init_predict(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<predict::Span>(module, "PredictedSpan", "What a rank does in a step.")
      .def_readonly("lane", &predict::Span::lane)
      .def_readonly("kind", &predict::Span::kind)
      .def_readonly("unit", &predict::Span::unit)
      .def_readonly("batch", &predict::Span::batch)
      .def_readonly("issued_ms", &predict::Span::issued_ms)
      .def_readonly("start_ms", &predict::Span::start_ms)
      .def_readonly("end_ms", &predict::Span::end_ms);
  py::class_<Prediction>(module, "Prediction", "A predicted step, see predict/prediction.h.")
      .def_readonly("step_ms", &Prediction::step_ms)
      .def_property_readonly("phases_ms", [](const Prediction& p) { return by_name(p.phases_ms); })
      .def_readonly("adamw_ms", &Prediction::adamw_ms)
      .def_readonly("beside_ms", &Prediction::beside_ms)
      .def_readonly("optimizer_ms", &Prediction::optimizer_ms)
      .def_readonly("update_ms", &Prediction::update_ms)
      .def_property_readonly("waits_ms", &waits_of)
      .def_property_readonly("busy_ms", [](const Prediction& p) { return by_name(p.busy_ms); })
      .def_readonly("intra_bytes", &Prediction::intra_bytes)
      .def_readonly("inter_bytes", &Prediction::inter_bytes)
      .def_readonly("memory_bytes", &Prediction::memory_bytes)
      .def_readonly("host_ms", &Prediction::host_ms)
      .def_property_readonly("begins_ms", [](const Prediction& p) { return by_name(p.begins_ms); })
      .def_readonly("spans", &Prediction::spans)
      .def_readonly("hidden", &Prediction::hidden);
  init_rates(module);
  module.attr("ADAMW_BYTES") = predict::Rates::kAdamwBytes;
  module.def(
      "predict",
      [](const plan::Plan& plan, const catalog::Model& model, const plan::Device& device,
         const plan::Network& network, int tokens, const std::string& contender,
         double host_sum_ms) {
        predict::Setting setting{plan, model.training, device, network, tokens};
        setting.host_sum_ms = host_sum_ms;
        return predict::predict(setting, contender_of(contender));
      },
      py::arg("plan"), py::arg("model"), py::arg("device"), py::arg("network"), py::arg("tokens"),
      py::arg("contender"), py::arg("host_sum_ms") = 0, no_gil);
  module.def(
      "issued",
      [](const plan::Plan& plan, const catalog::Model& model, int rank) {
        const predict::Setting setting{plan, model.training, {}, {}, 1};
        std::vector<std::tuple<std::string, std::string, std::string, int>> issued;
        for (const simulate::Issue& issue : predict::owned_step(setting, core::Owner(rank))) {
          if (issue.compute) continue;
          const bool on_batch = issue.is_on_batch();
          issued.emplace_back(
              schedule::name_of(issue.lane()), schedule::name_of(issue.operation.kind),
              on_batch ? "batch" : "unit",
              on_batch ? issue.operation.batch().value() : issue.operation.unit().value());
        }
        return issued;
      },
      py::arg("plan"), py::arg("model"), py::arg("rank"), no_gil);
}

}  // namespace dmuon::bindings
