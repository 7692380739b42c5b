// Builds the schedule of one pass, and its window.

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "dmuon/schedule/maker.h"

namespace dmuon::schedule {
namespace {

// Routes in flight. Whole gradients must arrive within the next unit's backward or two. Nodes'
// means travel slowly but are small, so as many are in flight as fit into memory.
constexpr int kMostWithOneStage = 2;
constexpr int kMostInStage1 = 1;

bool uses_weights(const Trigger& trigger) { return trigger.moment == Moment::kBeforeUse; }

/// Builds one pass. Operations of a trigger itself go to `before` and `after`. Publications, which
/// move ahead, go between them.
class PassBuilder {
 public:
  PassBuilder(const Layout& layout, const Batches& batches, const Trace& trace,
              const Trace& forward, Pass pass, const StepOptions& options, bool sync)
      : maker_(layout, batches),
        layout_(layout),
        trace_(trace),
        pass_(pass),
        options_(options),
        sync_(sync),
        window_(window_of(layout, options)),
        parts_(trace.size()),
        stage_2_bytes_(layout.num_shards, 0) {
    for (std::size_t i = 0; i < trace.size(); ++i) {
      if (uses_weights(trace[i]) && !empty(trace[i]) && !is_again(i)) uses_.push_back(i);
    }
    if (maker_.has_inter()) publish_inter(units_by_first_use(layout, forward));
    publish_intra();
    serve_triggers();
  }

  PassSchedule take() {
    PassSchedule schedule;
    for (Parts& parts : parts_) {
      std::vector<Operation>& all = schedule.emplace_back(std::move(parts.before));
      for (const auto& part : {parts.inter, parts.intra, parts.after})
        all.insert(all.end(), part.begin(), part.end());
    }
    return schedule;
  }

 private:
  bool empty(const Trigger& trigger) const { return layout_.units[trigger.unit].empty(); }

  // True if the unit's weights are there since an earlier use, which nothing has ended.
  bool is_again(std::size_t place) const {
    const auto same = [&](const Trigger& trigger) { return trigger.unit == trace_[place].unit; };
    const auto rest = trace_.rend() - static_cast<std::ptrdiff_t>(place);
    const auto earlier = std::find_if(rest, trace_.rend(), same);
    return earlier != trace_.rend() && uses_weights(*earlier);
  }

  struct Parts {
    std::vector<Operation> before, inter, intra, after;
  };

  // Returns the trigger at which to issue the publication for uses_[use]: up to `ahead` uses ahead,
  // but not before the unit's buffer is free.
  std::size_t place(std::size_t use, int ahead) const {
    const auto distance = static_cast<std::size_t>(ahead);
    std::size_t place = use >= distance ? uses_[use - distance] : uses_[0];
    const std::size_t last = uses_[use];
    for (std::size_t i = last; ahead > 0 && i-- > place;) {
      const bool freed = trace_[i].unit == trace_[last].unit && !uses_weights(trace_[i]);
      if (freed) place = i;
    }
    return place;
  }

  void publish_inter(const std::vector<core::UnitIndex>& forward_units) {
    if (!options_.node_copy) {
      for (std::size_t use = 0; use < uses_.size(); ++use) {
        const Operation operation = maker_.publish_inter(trace_[uses_[use]].unit);
        parts_[place(use, window_.inter)].inter.push_back(operation);
      }
      return;
    }
    // Publishes once a version: in a forward for a unit's first use, in a backward for units that
    // the forward did not use.
    std::vector<std::size_t> first_uses;
    std::set<core::UnitIndex> seen;
    if (pass_ == Pass::kBackward) seen.insert(forward_units.begin(), forward_units.end());
    for (const std::size_t use : uses_) {
      if (seen.insert(trace_[use].unit).second) first_uses.push_back(use);
    }
    const auto ahead = static_cast<std::size_t>(window_.inter);
    for (std::size_t i = 0; i < first_uses.size(); ++i) {
      const std::size_t at = ahead == 0 ? first_uses[i] : i >= ahead ? first_uses[i - ahead] : 0;
      parts_[at].inter.push_back(maker_.publish_inter(trace_[first_uses[i]].unit));
    }
  }

  void publish_intra() {
    for (std::size_t use = 0; use < uses_.size(); ++use) {
      const Operation operation = maker_.publish_intra(trace_[uses_[use]].unit);
      parts_[place(use, window_.intra)].intra.push_back(operation);
    }
  }

  void serve_triggers() {
    std::set<core::UnitIndex> later_releases;
    std::vector<bool> last(trace_.size(), false);
    for (std::size_t i = trace_.size(); i-- > 0;) {
      if (trace_[i].moment == Moment::kAfterBackward)
        last[i] = later_releases.insert(trace_[i].unit).second;
    }
    for (std::size_t i = 0; i < trace_.size(); ++i) {
      if (empty(trace_[i])) continue;
      const core::UnitIndex unit = trace_[i].unit;
      Parts& parts = parts_[i];
      switch (trace_[i].moment) {
        case Moment::kBeforeUse:
          parts.after = {maker_.await_weights(unit)};
          break;
        case Moment::kAfterForward:
          parts.before = {maker_.reshard(unit)};
          break;
        case Moment::kAfterBackward:
          parts.before = {maker_.reshard(unit)};
          if (last[i]) route(unit, parts.after);
          break;
      }
    }
  }

  void route(core::UnitIndex unit, std::vector<Operation>& to) {
    finish_stage_1(std::max(window_.route_stage_1 - 1, 0), to);
    while (!in_stage_2_.empty() && !fits_in_stage_2(unit)) finish_stage_2(to);
    for (const Operation& stage : maker_.route(unit, sync_)) {
      to.push_back(stage);
      if (stage.kind == Kind::kRouteIntra) {
        in_stage_1_.push_back(unit);
      } else {
        begin_stage_2(unit);
      }
    }
    finish_stage_1(window_.route_stage_1, to);
    while (!in_stage_2_.empty() && window_.always_in_stage_2 == 0) finish_stage_2(to);
  }

  // Finishes the oldest ones until so many remain.
  void finish_stage_1(int num_left, std::vector<Operation>& to) {
    for (; static_cast<int>(in_stage_1_.size()) > num_left; in_stage_1_.pop_front())
      to.push_back(maker_.finish_route_intra(in_stage_1_.front()));
  }

  void begin_stage_2(core::UnitIndex unit) {
    in_stage_2_.push_back(unit);
    count_in_stage_2(unit, 1);
  }

  void finish_stage_2(std::vector<Operation>& to) {
    to.push_back(maker_.finish_route_inter(in_stage_2_.front()));
    count_in_stage_2(in_stage_2_.front(), -1);
    in_stage_2_.pop_front();
  }

  // In stage 2 a route has its node's mean and, at most, an inbox as large.
  double bytes_in_stage_2(core::UnitIndex unit, core::Shard column) const {
    return 2 * static_cast<double>(layout_.node_mean(layout_.units[unit], column));
  }

  void count_in_stage_2(core::UnitIndex unit, int times) {
    for (const core::Shard column : layout_.shards())
      stage_2_bytes_[column] += times * bytes_in_stage_2(unit, column);
  }

  // True if the unit's route may be in stage 2 beside those that are.
  bool fits_in_stage_2(core::UnitIndex unit) const {
    if (static_cast<int>(in_stage_2_.size()) < window_.always_in_stage_2) return true;
    for (const core::Shard column : layout_.shards()) {
      if (stage_2_bytes_[column] + bytes_in_stage_2(unit, column) > window_.most_stage_2_bytes)
        return false;
    }
    return true;
  }

  Maker maker_;
  const Layout& layout_;
  const Trace& trace_;
  Pass pass_;
  const StepOptions& options_;
  bool sync_;
  Window window_;
  std::vector<Parts> parts_;                             // [triggers]
  std::vector<std::size_t> uses_;                        // places of kBeforeUse
  std::deque<core::UnitIndex> in_stage_1_, in_stage_2_;  // units whose route is not finished
  core::Vector<core::Shard, double> stage_2_bytes_;      // of each column's members
};

}  // namespace

Window window_of(const Layout& layout, const StepOptions& options) {
  const bool through_buffers = layout.num_replicates > 1 && !options.node_copy;
  const int most_ahead = options.units_in_flight() - 1;
  Window window{};
  window.inter = through_buffers ? std::min(options.lookahead, most_ahead) : options.lookahead;
  window.intra = std::min({1, options.lookahead, most_ahead});

  // Products of the largest bytes and counts exceed 64 bits. A double is exact below 2^53.
  const auto weights = static_cast<double>(layout.largest_weights());
  const auto gradients = static_cast<double>(layout.largest_gradients());
  const int buffers = 1 + (through_buffers ? window.inter : window.intra);
  const double granted = options.units_in_flight();
  // Returns the bytes that remain of granted * (weights + gradients) beside so many gradients.
  const auto left = [&](int whole) {
    return (granted - buffers) * weights + (granted - whole) * gradients;
  };
  // In stage 1 a route holds its gradients and an inbox that is no larger.
  int& stage_1 = window.route_stage_1;
  const int most = layout.has_inter() ? kMostInStage1 : kMostWithOneStage;
  while (stage_1 < std::min(options.lookahead, most) && left(3 + 2 * stage_1) >= 0) ++stage_1;
  if (!layout.has_inter()) return window;
  // Allows at least two, so that slow links stay busy if a column owns most of a unit.
  window.always_in_stage_2 = 2 * stage_1;
  window.most_stage_2_bytes = left(1 + 2 * stage_1);
  return window;
}

PassSchedule build_pass_schedule(const Layout& layout, const Batches& batches, const Trace& trace,
                                 const Trace& forward, Pass pass, const StepOptions& options,
                                 bool sync) {
  return PassBuilder(layout, batches, trace, forward, pass, options, sync).take();
}

}  // namespace dmuon::schedule
