#pragma once

#include <cstddef>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/predict/setting.h"

namespace dmuon::predict {

/// Durations of a device's own work and of messages, in microseconds.
class Rates {
 public:
  /// Bytes an element of fused AdamW, which reads parameter, gradient and two moments, and writes
  /// all but the gradient.
  static constexpr double kAdamwBytes = 28;

  explicit Rates(const Setting& setting);

  double compute_us(double flops) const { return flops / (training_tflops_ * 1e6); }
  /// Fused AdamW over elements in fp32.
  double adamw_us(double elements) const { return elements * kAdamwBytes / memory_bytes_per_us_; }

  /// A collective of all devices of a node.
  /// @param parts      bytes that each of them sends to, or receives from, each other one.
  /// @param publishes  they are weights, see plan::busiest_direction().
  double intra_us(const std::vector<double>& parts, bool publishes) const;
  /// A collective of each column.
  /// @param parts  [columns][replicates] likewise.
  /// @return       [columns]
  std::vector<double> inter_us(const std::vector<std::vector<double>>& parts, bool publishes) const;
  /// What inter_us() has of it for no bytes.
  double inter_latency_us(std::size_t num_nodes) const;

 private:
  double busiest(const std::vector<double>& parts, bool publishes) const;

  double training_tflops_;
  double memory_bytes_per_us_;
  double link_bytes_per_us_;
  double link_latency_us_;
  double adapter_bytes_per_us_;
  double adapter_latency_us_;
  bool adapter_per_device_;
  bool on_gloo_;  // whose members send to each other without a ring
};

/// Returns how often gradients that no owner takes pass along an axis. FSDP2 scatters them in rows
/// and sums them in columns, there and back. Beside replicated weights an all-reduce sums them over
/// all slots, there and back: NCCL is taken to go along rows, then columns; gloo has one ring.
double times_routed(const plan::Plan& plan, layout::Axis axis);

/// The time of a unit's forward: its matrices, its attention, and the output head's in the last
/// unit, which it follows.
/// @return  [kOutside (owned.h), then units of plan::group_by_unit()]
core::Vector<core::UnitIndex, double> forward_us(const Setting& setting, const Rates& rates);

}  // namespace dmuon::predict
