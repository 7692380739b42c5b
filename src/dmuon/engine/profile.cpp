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
    spans.push_back({operation.kind, operation.unit, clock_.seconds(operation.issued),
                     clock_.seconds(operation.started), clock_.seconds(operation.done)});
  return spans;
}

void Profile::add(const Measured& operation) {
  const std::scoped_lock lock(mutex_);
  const double seconds = operation.done.host - operation.started.host;
  durations_[static_cast<std::size_t>(operation.kind)] += seconds;
  const bool waits = operation.kind == Kind::kAwaitWeights || operation.kind == Kind::kReshard ||
                     operation.kind == Kind::kFinishRouteIntra ||
                     operation.kind == Kind::kFinishRouteInter;
  if (waits) waits_[static_cast<std::size_t>(phase_)] += seconds;
  if (recording_) operations_.push_back(operation);
}

std::map<std::string, double> Profile::seconds() const {
  const std::scoped_lock lock(mutex_);
  std::map<std::string, double> all;
  double& intra = all["busy_intra_s"];
  double& inter = all["busy_inter_s"];
  for (int i = 0; i < schedule::kNumKinds; ++i) {
    const auto kind = static_cast<Kind>(i);
    if (schedule::lane_of(kind) == schedule::Lane::kCompute) continue;
    const double seconds = durations_[static_cast<std::size_t>(i)];
    (schedule::lane_of(kind) == schedule::Lane::kIntra ? intra : inter) += seconds;
    std::string name = schedule::name_of(kind);
    std::replace(name.begin(), name.end(), ' ', '_');
    all[name + "_s"] = seconds;
  }
  constexpr const char* kPhases[] = {"forward", "backward", "step"};
  for (std::size_t i = 0; i < waits_.size(); ++i)
    all["wait_" + std::string(kPhases[i]) + "_s"] = waits_[i];
  return all;
}

}  // namespace dmuon::engine
