#pragma once

#include "dmuon/catalog/catalog.h"
#include "dmuon/plan/plan.h"

namespace dmuon::predict {

/// The task of a prediction.
struct Setting {
  plan::Plan plan;  ///< mesh, matrices, owners, batches and their costs, options of the step
  catalog::Training training;
  plan::Device device;
  plan::Network network;
  int tokens = 0;  ///< of each device and step
  /// CPU time of hooks and launches for a unit in a step, by dmuon beside FSDP2, by dmuon alone,
  /// and by FSDP2 alone: measured with 28 blocks on 2x8 ranks (bench/README.md, host_time.py).
  /// Nobody has measured DistributedDataParallel's; it counts as none.
  double owned_host_ms = 1.8;
  double replicated_host_ms = 0.5;
  double sharded_host_ms = 1.5;
  /// On CPUs, the time of FSDP2's sum of a unit's norms between nodes while gradients of matrices
  /// are on their way. It blocks the host. Each of its messages waits for the bytes that the kernel
  /// has queued before.
  double host_sum_ms = 0;
};

/// @throws InvalidArgument for tokens that are not positive, a plan without matrices, a training
///         that lacks units of the plan, or bad constants of the device, the network or the host.
void validate(const Setting& setting);

}  // namespace dmuon::predict
