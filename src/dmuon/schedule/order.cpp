#include "dmuon/schedule/order.h"

#include <algorithm>
#include <set>

#include "dmuon/core/error.h"

namespace dmuon::schedule {

void Order::Trace::begin() {
  cursor = 0;
  if (replaying()) return;
  operations.clear();
  last.clear();
  known = false;
  deviated = false;
}

bool Order::Trace::lies_ahead(Operation operation) const {
  return std::find(operations.begin() + static_cast<std::ptrdiff_t>(cursor), operations.end(),
                   operation) != operations.end();
}

bool Order::Trace::contains(Operation operation) const {
  return std::find(operations.begin(), operations.end(), operation) != operations.end();
}

std::vector<Issue> Order::Trace::take(std::size_t end) {
  std::vector<Issue> issues;
  for (; cursor < end; ++cursor) {
    issues.push_back({operations[cursor], /*compare=*/false, last[cursor]});
  }
  return issues;
}

std::vector<Issue> Order::Trace::advance(Operation operation) {
  if (replaying() && lies_ahead(operation)) {
    const auto found = std::find(operations.begin() + static_cast<std::ptrdiff_t>(cursor),
                                 operations.end(), operation);
    return take(static_cast<std::size_t>(found - operations.begin()) + 1);
  }
  if (known) {
    deviated = true;  // begin() forgets the trace
  } else {
    operations.push_back(operation);
  }
  // Which release is the last is not known while tracing: each one routes what has arrived.
  return {{operation, /*compare=*/true, operation.action == Action::kRelease}};
}

std::vector<Issue> Order::Trace::finish() {
  if (replaying()) return take(operations.size());
  if (deviated) return {};
  last.assign(operations.size(), false);
  std::set<int> released;
  for (std::size_t i = operations.size(); i-- > 0;) {
    if (operations[i].action != Action::kRelease) continue;
    last[i] = released.insert(operations[i].unit).second;
  }
  known = true;
  return {};
}

void Order::Trace::keep_last_unit() {
  if (!operations.empty() && operations.back().action == Action::kReshard) {
    operations.pop_back();
    last.pop_back();
  }
}

std::vector<Issue> Order::begin(Pass pass) {
  std::vector<Issue> owed = end_pass();
  current_ = pass;
  if (pass != Pass::kEvalForward) unanswered_ = pass == Pass::kTrainForward;
  trace().begin();
  return owed;
}

std::vector<Issue> Order::begin_forward(bool training) {
  return begin(training ? Pass::kTrainForward : Pass::kEvalForward);
}

std::vector<Issue> Order::begin_backward() { return begin(Pass::kBackward); }

std::vector<Issue> Order::request(Operation operation) {
  std::vector<Issue> issues;
  core::invariant(current_.has_value(), "Order::request: no pass is open");
  const bool forward = *current_ != Pass::kBackward;
  if (forward && trace().replaying() && !trace().lies_ahead(operation) &&
      trace().contains(operation)) {
    issues = begin(*current_);
  }
  std::vector<Issue> more = trace().advance(operation);
  issues.insert(issues.end(), more.begin(), more.end());
  return issues;
}

std::vector<Issue> Order::end_pass() {
  if (!current_) return {};
  const bool traced = on_demand();
  std::vector<Issue> owed = trace().finish();
  if (traced && current_ == Pass::kTrainForward) trace().keep_last_unit();
  current_.reset();
  return owed;
}

bool Order::owes(Operation operation) const {
  if (!current_) return false;
  const Trace& trace = traces_[static_cast<int>(*current_)];
  return trace.replaying() && trace.lies_ahead(operation);
}

bool Order::owes_backward() const {
  return unanswered_ && traces_[static_cast<int>(Pass::kBackward)].replaying();
}

bool Order::on_demand() const {
  return current_ && !traces_[static_cast<int>(*current_)].replaying();
}

}  // namespace dmuon::schedule
