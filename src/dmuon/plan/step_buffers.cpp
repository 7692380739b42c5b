#include "dmuon/plan/step_buffers.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "dmuon/core/idle_blocks.h"
#include "dmuon/schedule/resolver.h"

namespace dmuon::plan {
namespace {

using schedule::Kind;
using schedule::Operation;

// The first one traces, the second one finds what the first has left.
constexpr int kSteps = 3;

// Records what engine::Executor does to buffers at each operation.
class Recorder final : public schedule::Performer {
 public:
  /// @param issues_updates  a late update takes and frees its memory when it is issued.
  Recorder(bool has_inter, bool copies_nodes, bool issues_updates)
      : has_inter_(has_inter), copies_nodes_(copies_nodes), issues_updates_(issues_updates) {}

  void take(core::UnitIndex unit, Buffer buffer) {
    events_.push_back({BufferEvent::Kind::kTake, unit, buffer});
  }

  void perform(const Operation& operation) override {
    // A batch may still be updated when buffers are taken that are issued before compute waits: for
    // the batch, or for weights that it completes.
    if (operation.kind == Kind::kApply) ++updates_;
    if (operation.kind == Kind::kFinishUpdate) --updates_;
    const bool waits = operation.kind == Kind::kFinishUpdate ||
                       (operation.kind == Kind::kAwaitWeights && updates_ > 0);
    if (issues_updates_ ? operation.kind == Kind::kApply : waits)
      events_.push_back({BufferEvent::Kind::kUpdate});
    if (schedule::is_on_batch(operation.kind)) return;
    const core::UnitIndex unit = operation.unit();
    switch (operation.kind) {
      case Kind::kPublishInter:
        if (!copies_nodes_) take(unit, Buffer::kWeights);
        return;
      case Kind::kPublishIntra:
        return take(unit, Buffer::kWeights);
      case Kind::kReshard:
        return give(unit, Buffer::kWeights);
      case Kind::kRouteIntra:
        take(unit, Buffer::kInbox);
        if (has_inter_) take(unit, Buffer::kNodeMean);
        return;
      case Kind::kRouteInter:
        return take(unit, Buffer::kNodeInbox);
      case Kind::kFinishRouteIntra:
        give(unit, Buffer::kGradients);
        return give(unit, Buffer::kInbox);
      case Kind::kFinishRouteInter:
        give(unit, Buffer::kNodeMean);
        return give(unit, Buffer::kNodeInbox);
      case Kind::kAwaitWeights:
      case Kind::kPrepare:
      case Kind::kGather:
      case Kind::kOrthogonalise:
      case Kind::kScatter:
      case Kind::kApply:
      case Kind::kFinishUpdate:
        return;
    }
  }

  void compare(const std::optional<schedule::Trigger>&) override {}
  void leave_to_host(const std::optional<schedule::Trigger>&) override {}
  void leave_before_forward() override {}

  std::vector<BufferEvent> events() && { return std::move(events_); }

 private:
  void give(core::UnitIndex unit, Buffer buffer) {
    events_.push_back({BufferEvent::Kind::kGive, unit, buffer});
  }

  bool has_inter_;
  bool copies_nodes_;
  bool issues_updates_;
  int updates_ = 0;  // batches that compute has not waited for
  std::vector<BufferEvent> events_;
};

// Blocks of memory as wire::BufferPool counts them.
class Pool {
 public:
  explicit Pool(bool keeps) : keeps_(keeps) {}

  /// @return  the bytes of the block.
  std::int64_t take(std::int64_t num_bytes) {
    if (const auto idle = idle_.take(num_bytes)) return idle->first;
    bytes_ += num_bytes - idle_.free_at_least(bytes_ + num_bytes - most_);
    most_ = std::max(most_, bytes_);
    return num_bytes;
  }

  void give(std::int64_t block_bytes) {
    if (keeps_) return idle_.give(block_bytes, {});
    bytes_ -= block_bytes;
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  struct Nothing {};
  bool keeps_;
  core::IdleBlocks<Nothing> idle_;
  std::int64_t bytes_ = 0;
  std::int64_t most_ = 0;
};

}  // namespace

std::vector<BufferEvent> buffer_events(const schedule::Layout& layout,
                                       const schedule::StepOptions& options, bool on_cpu) {
  Recorder recorder(layout.has_inter(), options.node_copy && layout.has_inter(),
                    options.late_updates && !on_cpu);
  const core::Indices<core::UnitIndex> units = layout.units.indices();
  schedule::Batches batches;
  for (const core::UnitIndex unit : units) batches.push_back({unit});
  schedule::Resolver resolver(layout, options, std::move(batches), &recorder);
  for (int step = 0; step < kSteps; ++step) {
    resolver.begin_forward(/*training=*/true, /*whole=*/true);
    for (const core::UnitIndex unit : units) {
      resolver.before_use(unit);
      resolver.after_forward(unit);
    }
    resolver.end_forward();
    resolver.begin_backward();
    for (int i = layout.units.size(); i-- > 0;) {
      const core::UnitIndex unit(i);
      resolver.before_backward(unit);
      resolver.before_gradient(unit);
      recorder.take(unit, Buffer::kGradients);
      resolver.after_backward(unit);
    }
    resolver.end_backward();
    resolver.settle_step();
    resolver.step();
  }
  return std::move(recorder).events();
}

BufferPeaks buffer_peaks(const std::vector<BufferEvent>& events, const BufferBytes& bytes,
                         bool keeps) {
  BufferPeaks peaks;
  Pool pool(keeps);
  BufferBytes held(bytes.size());  // of the blocks
  for (const BufferEvent& event : events) {
    if (event.kind == BufferEvent::Kind::kUpdate) {
      peaks.at_update = std::max(peaks.at_update, pool.bytes());
      continue;
    }
    const auto which = static_cast<std::size_t>(event.buffer);
    std::int64_t& block = held[event.unit][which];
    const std::int64_t wanted = bytes[event.unit][which];
    if (event.kind == BufferEvent::Kind::kTake && block == 0 && wanted > 0) {
      block = pool.take(wanted);
      peaks.most = std::max(peaks.most, pool.bytes());
    } else if (event.kind == BufferEvent::Kind::kGive && block > 0) {
      pool.give(std::exchange(block, 0));
    }
  }
  return peaks;
}

}  // namespace dmuon::plan
