#pragma once

#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/schedule/step_schedule.h"
#include "tests/schedule/triggers.h"

namespace dmuon::schedule {

// Three units of 8 elements, fp32, that all slots own alike. Slots: 1, 2, 4 or 8.
inline Layout three_units(int num_replicates, int num_shards) {
  Layout layout{{num_replicates, num_shards}, {}};
  const int num_slots = layout.num_slots();
  for (const char* name : {"a", "b", "c"}) {
    const core::Vector<core::Slot, std::int64_t> parts(num_slots, 8 / num_slots);
    layout.units.push_back({name, parts, 4, 4});
  }
  return layout;
}

inline Batches batches_of(const std::vector<std::vector<int>>& units) {
  Batches batches;
  for (const std::vector<int>& touched : units)
    batches.push_back(std::vector<core::UnitIndex>(touched.begin(), touched.end()));
  return batches;
}

inline const Trace kForward{before_use(0), after_forward(0), before_use(1), after_forward(1),
                            before_use(2)};
inline const Trace kBackward{before_use(2),     after_backward(2), before_use(1),
                             after_backward(1), before_use(0),     after_backward(0)};

inline std::string text_of(const Operation& operation) {
  const bool on_batch = is_on_batch(operation.kind);
  return core::message(name_of(operation.kind), ' ',
                       on_batch ? operation.batch().value() : operation.unit().value());
}

// What text_of says of the update of a batch.
inline std::string update(int batch) {
  return core::message("prepare ", batch, ", orthogonalise ", batch, ", apply ", batch);
}

inline std::string text_of(const std::vector<Operation>& operations) {
  std::string text;
  for (const Operation& operation : operations)
    text += (text.empty() ? "" : ", ") + text_of(operation);
  return text;
}

}  // namespace dmuon::schedule
