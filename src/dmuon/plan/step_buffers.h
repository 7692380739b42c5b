#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/schedule/operation.h"
#include "dmuon/schedule/step_options.h"

namespace dmuon::plan {

/// A packed buffer of a unit. While its gradients travel inside the node their inbox is beside
/// them, while the node's mean travels between nodes there is one beside that.
enum class Buffer : int { kWeights, kGradients, kInbox, kNodeMean, kNodeInbox };
inline constexpr int kNumBuffers = 5;

/// A packed buffer is taken or given back, or a batch has been updated.
struct BufferEvent {
  enum class Kind { kTake, kGive, kUpdate } kind{};
  core::UnitIndex unit{};  ///< not of kUpdate
  Buffer buffer{};         ///< not of kUpdate
};

/// The first steps of a training in which each unit is used once a pass, in order: what
/// schedule::Resolver decides, which decides for the engine too. Alike on all ranks.
/// A late update is counted up to the use of its weights on CPUs, whose threads run it in the
/// forward. Elsewhere it has taken and freed its memory when step() has issued it.
/// @param layout  of units that are not empty.
std::vector<BufferEvent> buffer_events(const schedule::Layout& layout,
                                       const schedule::StepOptions& options, bool on_cpu = true);

/// Bytes of packed buffers over these events.
struct BufferPeaks {
  std::int64_t most = 0;
  std::int64_t at_update = 0;  ///< while batches are updated
};

/// Each unit's buffers.
using BufferBytes = core::Vector<core::UnitIndex, std::array<std::int64_t, kNumBuffers>>;

/// @param bytes  one of 0 bytes is never taken.
/// @param keeps  what is given back waits for the next buffer, as in wire::BufferPool on CPUs.
BufferPeaks buffer_peaks(const std::vector<BufferEvent>& events, const BufferBytes& bytes,
                         bool keeps);

}  // namespace dmuon::plan
