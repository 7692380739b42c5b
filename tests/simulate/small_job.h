#pragma once

#include "dmuon/simulate/program.h"
#include "tests/schedule/triggers.h"

namespace dmuon::simulate {

/// Three units in sequence, of 8 elements each that all slots own alike, one batch a slot and unit;
/// no events. Weights are 16 bytes a unit and gradients 32. Slots: 1, 2, 4 or 8.
inline Job small_job(int num_replicates, int num_shards) {
  using schedule::after_backward;
  using schedule::after_forward;
  using schedule::before_use;
  Job job;
  job.layout.num_replicates = num_replicates;
  job.layout.num_shards = num_shards;
  const int num_slots = num_replicates * num_shards;
  for (const char* name : {"a", "b", "c"}) {
    const core::Vector<core::Slot, std::int64_t> parts(num_slots, 8 / num_slots);
    job.layout.units.push_back({name, parts, 2, 4});
  }
  job.forward = {before_use(0),    after_forward(0), before_use(1),
                 after_forward(1), before_use(2),    after_forward(2)};
  job.evaluation = job.forward;
  job.backward = {before_use(2),     after_backward(2), before_use(1),
                  after_backward(1), before_use(0),     after_backward(0)};
  schedule::Batches batches;
  for (const core::UnitIndex unit : job.layout.units.indices()) batches.push_back({unit});
  job.batches.resize(num_slots, batches);
  return job;
}

}  // namespace dmuon::simulate
