#include "dmuon/schedule/order.h"

#include <algorithm>

#include "dmuon/core/error.h"

namespace dmuon::schedule {

std::ostream& operator<<(std::ostream& out, const Trigger& trigger) {
  static constexpr const char* kMoments[] = {"before use", "after forward", "after backward"};
  return out << kMoments[static_cast<int>(trigger.moment)] << " of " << trigger.unit;
}

void Order::Course::begin() {
  cursor = 0;
  notes.clear();
  if (replaying()) return;
  triggers.clear();
  tail = kNoTail;
  known = false;
  deviated = false;
}

// Returns the trigger's next place from the cursor on, or the end.
std::size_t Order::Course::find(Trigger trigger) const {
  const auto begin = triggers.begin() + static_cast<std::ptrdiff_t>(cursor);
  return static_cast<std::size_t>(std::find(begin, triggers.end(), trigger) - triggers.begin());
}

bool Order::Course::lies_ahead(Trigger trigger) const { return find(trigger) < triggers.size(); }

bool Order::Course::contains(Trigger trigger) const {
  return std::find(triggers.begin(), triggers.end(), trigger) != triggers.end();
}

std::vector<Crossing> Order::Course::take(std::size_t end, Pass pass) {
  std::vector<Crossing> crossings;
  for (; cursor < end; ++cursor) {
    crossings.push_back({triggers[cursor], pass, static_cast<int>(cursor)});
  }
  return crossings;
}

std::vector<Crossing> Order::Course::advance(Trigger trigger, Pass pass) {
  if (replaying() && lies_ahead(trigger)) return take(find(trigger) + 1, pass);
  if (known) {
    deviated = true;  // begin() forgets the trace
  } else {
    triggers.push_back(trigger);
  }
  return {{trigger, pass, -1}};
}

bool Order::is_read(const Trigger& trigger) const { return read_.contains(trigger.unit); }

void Order::keep_last_units() {
  Trace& triggers = course().triggers;
  const auto ends = [&] {
    return !triggers.empty() && triggers.back().moment == Moment::kAfterForward;
  };
  if (!ends()) return;
  const bool read = is_read(triggers.back());
  triggers.pop_back();
  while (read && ends() && is_read(triggers.back())) triggers.pop_back();
}

void Order::begin(Pass pass) {
  core::invariant(!current_, "Order::begin: a pass is open");
  current_ = pass;
  if (pass != Pass::kEvalForward) unanswered_ = pass == Pass::kTrainForward;
  course().begin();
}

void Order::begin_forward(bool training, bool has_end) {
  begin(training ? Pass::kTrainForward : Pass::kEvalForward);
  has_end_ = has_end;
}

void Order::begin_backward() { begin(Pass::kBackward); }

bool Order::starts_forward(Trigger trigger) const {
  const bool may_begin = *current_ != Pass::kBackward && !has_end_;
  return may_begin && course().replaying() && !course().lies_ahead(trigger) &&
         course().contains(trigger) && !owes_host_use();
}

std::vector<Crossing> Order::request(Trigger trigger) {
  std::vector<Crossing> crossings;
  core::invariant(current_.has_value(), "Order::request: no pass is open");
  if (starts_forward(trigger)) {
    const Pass pass = *current_;
    crossings = end_pass();
    begin(pass);
  }
  const auto add = [&](const std::vector<Crossing>& more) {
    crossings.insert(crossings.end(), more.begin(), more.end());
  };
  if (course().replaying() && course().lies_ahead(trigger) &&
      course().find(trigger) > next_host_use()) {
    add(catch_up_to_host_use());
    course().deviated = true;
  }
  add(course().advance(trigger, *current_));
  return crossings;
}

void Order::note_end(Trigger end) {
  read_.insert(end.unit);
  forget_end(end.unit);
  if (on_demand()) course().notes.push_back({end, course().triggers.size()});
}

void Order::renew_note(Trigger end) {
  const std::vector<Trigger> noted = noted_ends();
  if (std::find(noted.begin(), noted.end(), end) != noted.end()) note_end(end);
}

bool Order::repeats(Trigger trigger) const {
  if (has_end_ || current_ != Pass::kEvalForward || course().known) return false;
  const Trace& triggers = course().triggers;
  return !triggers.empty() && triggers.front() == trigger &&
         std::count(triggers.begin(), triggers.end(), trigger) >= kFewestRepeats;
}

bool Order::keep_period() {
  Trace& triggers = course().triggers;
  const Trigger first = triggers.front();
  for (auto second = triggers.begin() + 1; second != triggers.end(); ++second) {
    const auto period = second - triggers.begin();
    if (*second != first || std::ssize(triggers) % period != 0) continue;
    if (!std::equal(second, triggers.end(), triggers.begin())) continue;
    triggers.resize(static_cast<std::size_t>(period));
    return true;
  }
  return std::count(triggers.begin(), triggers.end(), first) >= kMostRepeats;
}

std::vector<Trigger> Order::owed_before(Trigger trigger) const {
  if (!current_) return {};
  const Trace& triggers = course().triggers;
  const auto rest = triggers.begin() + static_cast<std::ptrdiff_t>(course().cursor);
  if (starts_forward(trigger)) {
    std::vector<Trigger> owed(rest, triggers.end());
    owed.insert(owed.end(), triggers.begin(), std::find(triggers.begin(), rest, trigger));
    return owed;
  }
  if (!owes(trigger)) return {};
  return {rest, std::find(rest, triggers.end(), trigger)};
}

std::vector<Crossing> Order::deviate_before(Trigger trigger) {
  core::invariant(current_ && course().contains(trigger),
                  "Order::deviate_before: the trace has no ", trigger);
  std::vector<Crossing> crossings = course().take(course().find(trigger), *current_);
  course().deviated = true;
  return crossings;
}

void Order::forget_end(core::UnitIndex unit) {
  if (current_) std::erase_if(course().notes, [&](const Note& n) { return n.end.unit == unit; });
}

std::vector<Trigger> Order::noted_ends() const {
  std::vector<Trigger> ends;
  if (!current_) return ends;
  for (const Note& note : course().notes) ends.push_back(note.end);
  return ends;
}

Crossing Order::cross_noted(Trigger end) {
  core::invariant(on_demand(), "Order::cross_noted: expected a pass without a trace");
  Course& open = course();
  const auto note = std::find_if(open.notes.begin(), open.notes.end(),
                                 [&](const Note& each) { return each.end == end; });
  core::invariant(note != open.notes.end(), "Order::cross_noted: ", end, " was not noted");
  const std::size_t place = note->place;
  open.notes.erase(note);
  if (!open.known) {
    open.triggers.insert(open.triggers.begin() + static_cast<std::ptrdiff_t>(place), end);
    for (Note& other : open.notes) other.place += other.place >= place ? 1 : 0;
    if (open.tail != kNoTail) ++open.tail;
  }
  return {end, *current_, -1};
}

void Order::begin_end() {
  if (current_ && !course().known) course().tail = course().triggers.size();
}

std::vector<Crossing> Order::catch_up() {
  if (!replaying()) return {};
  return course().take(course().triggers.size(), *current_);
}

std::vector<Crossing> Order::catch_up_to_host_use() {
  if (!replaying()) return {};
  return course().take(next_host_use(), *current_);
}

std::vector<Crossing> Order::end_pass() {
  if (!current_) return {};
  const bool traced = on_demand();
  std::vector<Crossing> owed = catch_up();
  if (!course().deviated) course().known = true;
  if (traced && current_ == Pass::kTrainForward) keep_last_units();
  current_.reset();
  return owed;
}

bool Order::owes_forward() const {
  return replaying() && current_ != Pass::kBackward && course().cursor < course().triggers.size();
}

bool Order::owes(Trigger trigger) const { return replaying() && course().lies_ahead(trigger); }

bool Order::is_next(Trigger trigger) const {
  return replaying() && course().cursor < course().triggers.size() &&
         course().triggers[course().cursor] == trigger;
}

const Trace& Order::trace(Pass pass) const {
  static const Trace kNone;
  const Course& course = courses_[static_cast<int>(pass)];
  return course.replaying() ? course.triggers : kNone;
}

bool Order::owes_backward() const {
  return unanswered_ && courses_[static_cast<int>(Pass::kBackward)].replaying();
}

// Returns its place in the trace, from the cursor on, or the end.
std::size_t Order::next_host_use() const {
  const Trace& triggers = course().triggers;
  for (std::size_t at = course().cursor; at < std::min(course().tail, triggers.size()); ++at) {
    const auto unit = static_cast<std::size_t>(triggers[at].unit.value());
    const Moment moment = triggers[at].moment;
    const bool has_hook = moment == Moment::kBeforeUse ||
                          (moment == Moment::kAfterBackward && !is_read(triggers[at]));
    if (has_hook && unit < host_.size() && host_[unit]) return at;
  }
  return triggers.size();
}

bool Order::owes_host_use() const {
  return replaying() && next_host_use() < course().triggers.size();
}

int Order::position() const { return replaying() ? static_cast<int>(course().cursor) : -1; }

bool Order::on_demand() const { return current_ && !course().replaying(); }

bool Order::replaying() const { return current_ && course().replaying(); }

}  // namespace dmuon::schedule
