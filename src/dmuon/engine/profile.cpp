#include "dmuon/engine/profile.h"

#include <algorithm>
#include <utility>

namespace dmuon::engine {

using schedule::Kind;

void Profile::set_phase(Phase phase) {
  const std::scoped_lock lock(mutex_);
  phase_ = phase;
}

void Profile::start() {
  const std::scoped_lock lock(mutex_);
  recording_ = true;
  operations_.clear();
  clock_.start();
}

std::vector<Span> Profile::stop() {
  const std::scoped_lock lock(mutex_);
  recording_ = false;
  clock_.stop();
  std::vector<Span> spans;
  for (const Measured& operation : std::exchange(operations_, {}))
    spans.push_back({operation.kind, operation.subject, clock_.seconds(operation.issued),
                     clock_.seconds(operation.started), clock_.seconds(operation.done)});
  return spans;
}

void Profile::add(const Measured& operation) {
  const std::scoped_lock lock(mutex_);
  const double seconds = operation.done.host - operation.started.host;
  durations_[operation.kind] += seconds;
  const bool waits = operation.kind == Kind::kAwaitWeights || operation.kind == Kind::kReshard ||
                     operation.kind == Kind::kFinishRouteIntra ||
                     operation.kind == Kind::kFinishRouteInter;
  if (waits) waits_[phase_] += seconds;
  if (recording_) operations_.push_back(operation);
}

std::map<std::string, double> Profile::seconds() const {
  const std::scoped_lock lock(mutex_);
  std::map<std::string, double> all;
  for (const schedule::Lane lane : schedule::kQueues)
    all["busy_" + std::string(schedule::name_of(lane)) + "_s"] = 0;
  for (const Kind kind : schedule::kKinds) {
    const schedule::Lane lane = schedule::lane_of(kind);
    if (lane == schedule::Lane::kCompute) continue;
    all["busy_" + std::string(schedule::name_of(lane)) + "_s"] += durations_[kind];
    std::string name = schedule::name_of(kind);
    std::replace(name.begin(), name.end(), ' ', '_');
    all[name + "_s"] = durations_[kind];
  }
  all["wait_forward_s"] = waits_[Phase::kForward];
  all["wait_backward_s"] = waits_[Phase::kBackward];
  all["wait_step_s"] = waits_[Phase::kStep];
  return all;
}

}  // namespace dmuon::engine
