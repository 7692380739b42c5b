#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "async_device/csrc/cuda_kernels.h"
#include "async_device/csrc/generator.h"
#include "async_device/csrc/group.h"
#include "async_device/csrc/launch_order.h"
#include "async_device/csrc/operators.h"
#include "async_device/csrc/settings.h"
#include "async_device/csrc/shape_inference.h"
#include "async_device/csrc/statistics.h"

namespace async_device {
namespace {

namespace py = pybind11;

template <typename T>
T choice(const std::map<std::string, T>& choices, const std::string& what,
         const std::string& given) {
  const auto found = choices.find(given);
  if (found != choices.end()) return found->second;
  std::string names;
  for (const auto& [name, value] : choices) names += (names.empty() ? "" : ", ") + name;
  throw py::value_error("configure: " + what + " must be one of " + names + "; got " + given);
}

void configure(const std::string& order, uint64_t seed, const std::string& races,
               const std::string& syncs, bool poison, double idle_ms, double stall_s,
               double hang_s) {
  Settings made = settings();
  made.order = choice<Order>({{"compute_first", Order::kComputeFirst},
                              {"side_first", Order::kSideFirst},
                              {"random", Order::kRandom},
                              {"issue_order", Order::kIssueOrder}},
                             "order", order);
  made.races = choice<Races>(
      {{"raise", Races::kRaise}, {"record", Races::kRecord}, {"off", Races::kOff}}, "races", races);
  made.syncs = choice<Syncs>({{"count", Syncs::kCount}, {"raise", Syncs::kRaise}}, "syncs", syncs);
  made.seed = seed;
  made.poison = poison;
  made.idle_ms = idle_ms;
  made.stall_s = stall_s;
  made.hang_s = hang_s;
  Device::get().reset();
  settings() = made;
  Device::get().reseed();
}

py::dict to_dict(const PhaseCounts& counts) {
  py::dict dict;
  dict["kernels"] = counts.kernels;
  dict["kernels_by_stream"] = counts.kernels_by_stream;
  dict["communication_launches"] = counts.communication_launches;
  dict["messages"] = counts.messages;
  dict["bytes_sent"] = counts.bytes_sent;
  dict["host_syncs"] = counts.host_syncs;
  dict["artificial_syncs"] = counts.artificial_syncs;
  dict["peak_bytes"] = counts.peak_bytes;
  return dict;
}

c10::intrusive_ptr<c10d::Backend> create_group(c10::intrusive_ptr<c10d::Backend> gloo,
                                               const std::string& name,
                                               const std::vector<int>& global_ranks,
                                               std::chrono::milliseconds timeout) {
  return c10::make_intrusive<Group>(std::move(gloo), name, global_ranks, timeout);
}

}  // namespace
}  // namespace async_device

PYBIND11_MODULE(_async_device, m) {
  using namespace async_device;  // NOLINT: of this module's function only
  prefer_cpu_kernels();
  m.def("configure", &configure, py::kw_only(), py::arg("order"), py::arg("seed"), py::arg("races"),
        py::arg("syncs"), py::arg("poison"), py::arg("idle_ms"), py::arg("stall_s"),
        py::arg("hang_s"));
  m.def("raise_at_syncs",
        [](bool raises) { settings().syncs = raises ? Syncs::kRaise : Syncs::kCount; });
  m.def("overlap", [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                      int64_t offset, const std::vector<int64_t>& other_sizes,
                      const std::vector<int64_t>& other_strides, int64_t other_offset) {
    return overlap(make_region(sizes, strides, offset, 4),
                   make_region(other_sizes, other_strides, other_offset, 4));
  });
  m.def("keep_shapes", &keep_shapes);
  m.def("run_cuda_kernels", &run_cuda_kernels);
  m.def("misplace_cuda_kernels", &misplace_cuda_kernels);
  m.def("create_group", &create_group);
  m.def("connect", [](c10::intrusive_ptr<c10d::Store> store, int rank, int num_ranks) {
    LaunchOrder::get().connect(std::move(store), rank, num_ranks);
  });
  m.def("check_order", [] { LaunchOrder::get().check(); });
  m.def("device_count", [] { return Device::kNumDevices; });
  m.def("current_device", [] { return current_device(); });
  m.def("set_device", [](int index) { current_device() = index; });
  m.def("default_generator", &default_generator);
  m.def("describe_queues", [] { return Device::get().describe_queues(); });
  m.def("reset", [] { Device::get().reset(); });
  m.def("record_schedule", [] { Device::get().record_schedule(); });
  m.def("replay_schedule", [](std::vector<int64_t> steps, std::vector<int64_t> observations) {
    Device::get().replay_schedule({std::move(steps), std::move(observations)});
  });
  m.def("stop_schedule", [] {
    Schedule::Record record = Device::get().stop_schedule();
    return std::make_pair(std::move(record.steps), std::move(record.observations));
  });
  m.def("stop", [] { Device::get().stop(); });
  m.def("enter_phase", [](const std::string& name) { return Statistics::get().enter(name); });
  m.def("races", [] { return Statistics::get().races(); });
  m.def("live_bytes", [] { return Statistics::get().live_bytes(); });
  m.def("restart_pools", [] { Device::get().restart_pools(); });
  m.def("reset_statistics", [] { Statistics::get().reset(); });
  m.def("statistics", [] {
    py::dict phases;
    for (const auto& [name, counts] : Statistics::get().phases()) {
      phases[py::str(name)] = to_dict(counts);
    }
    return phases;
  });
}
