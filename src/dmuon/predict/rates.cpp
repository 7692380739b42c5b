#include "dmuon/predict/rates.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "dmuon/core/error.h"
#include "dmuon/plan/wire_time.h"

namespace dmuon::predict {
namespace {

constexpr double kGigabytesPerSecond = 1e3;  // in bytes a microsecond
// A collective inside a node: NCCL's kernel, and its members' handshake.
constexpr double kLinkLaunches = 2;

double steps_of_tree(std::size_t num_members) {
  return static_cast<double>(std::bit_width(num_members - 1));
}

}  // namespace

void validate(const Setting& setting) {
  plan::validate(setting.device);
  plan::validate(setting.network);
  for (const double ms : {setting.owned_host_ms, setting.replicated_host_ms,
                          setting.sharded_host_ms, setting.host_sum_ms})
    core::require(std::isfinite(ms) && ms >= 0, "predict: host times must be >= 0; got ", ms);
  core::require(setting.tokens > 0, "predict: tokens must be > 0; got ", setting.tokens);
  core::require(!setting.plan.inventory.empty(), "predict: plan: expected a matrix; got none");
  for (const plan::Parameter& parameter : setting.plan.inventory) {
    core::require(parameter.unit < setting.training.unit_flops.size() &&
                      parameter.unit < setting.training.attention_flops.size(),
                  "predict: training: expected FLOPs of unit ", parameter.unit, " of '",
                  parameter.name, "'; got those of ", setting.training.unit_flops.size(), " units");
  }
}

Rates::Rates(const Setting& setting)
    : training_tflops_(setting.device.training_tflops),
      memory_bytes_per_us_(setting.device.elementwise_gb_per_s * kGigabytesPerSecond),
      link_bytes_per_us_(setting.device.link_gb_per_s * kGigabytesPerSecond),
      link_latency_us_(setting.device.launch_us * kLinkLaunches),
      adapter_bytes_per_us_(setting.network.gb_per_s * kGigabytesPerSecond),
      adapter_latency_us_(setting.network.latency_us),
      adapter_per_device_(setting.network.per_device),
      on_gloo_(setting.plan.options.on_cpu) {}

double Rates::busiest(const std::vector<double>& parts, bool publishes) const {
  const double received = plan::most_received(parts);
  if (!on_gloo_) return received;
  const double most = *std::max_element(parts.begin(), parts.end());
  return plan::busiest_direction(received, most, static_cast<int>(parts.size()), publishes);
}

double Rates::intra_us(const std::vector<double>& parts, bool publishes) const {
  if (parts.size() < 2) return 0;
  return busiest(parts, publishes) / link_bytes_per_us_ +
         link_latency_us_ * steps_of_tree(parts.size());
}

double Rates::inter_latency_us(std::size_t num_nodes) const {
  return num_nodes < 2 ? 0 : adapter_latency_us_ * steps_of_tree(num_nodes);
}

std::vector<double> Rates::inter_us(const std::vector<std::vector<double>>& parts,
                                    bool publishes) const {
  std::vector<double> us(parts.size(), 0.0);
  const std::size_t num_nodes = parts.front().size();
  if (num_nodes < 2) return us;
  const double latency_us = inter_latency_us(num_nodes);
  if (adapter_per_device_) {
    std::transform(parts.begin(), parts.end(), us.begin(), [&](const std::vector<double>& column) {
      return busiest(column, publishes) / adapter_bytes_per_us_ + latency_us;
    });
    return us;
  }
  // All columns send at once, through one adapter a node.
  std::vector<double> of_node(num_nodes, 0.0);
  for (const std::vector<double>& column : parts)
    std::transform(column.begin(), column.end(), of_node.begin(), of_node.begin(), std::plus<>());
  us.assign(us.size(), busiest(of_node, publishes) / adapter_bytes_per_us_ + latency_us);
  return us;
}

double times_routed(const plan::Plan& plan, layout::Axis axis) {
  const bool replicated = plan.options.replicated;
  const double sent = axis == layout::Axis::kColumn || replicated ? 2 : 1;
  const int members = plan.mesh.size(axis);
  if (!replicated || !plan.options.on_cpu || members == 1) return sent;
  // The links of one ring through all slots take more than those of a ring along the axis.
  const auto passed_on = [](int ranks) { return 1 - 1.0 / ranks; };
  return sent * passed_on(plan.mesh.num_slots()) / passed_on(members);
}

core::Vector<core::UnitIndex, double> forward_us(const Setting& setting, const Rates& rates) {
  const catalog::Training& training = setting.training;
  const double tokens = setting.tokens;
  // The ranks of a slot share their tokens, and each computes a part of every token.
  const double in_slot = tokens * setting.plan.mesh.tensor_parallel;
  core::Vector<core::UnitIndex, double> all{0.0};  // embeddings are looked up
  for (const auto& parameters : plan::group_by_unit(setting.plan.inventory)) {
    const core::UnitIndex unit(setting.plan.inventory[parameters.front()].unit);
    all.push_back(rates.compute_us(catalog::token_flops(training, unit, in_slot) * tokens));
  }
  all.back() += rates.compute_us(training.outside_flops * tokens);  // the head
  return all;
}

}  // namespace dmuon::predict
