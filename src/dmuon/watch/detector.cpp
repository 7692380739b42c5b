#include "dmuon/watch/detector.h"

#include <algorithm>
#include <tuple>

#include "dmuon/core/error.h"

namespace dmuon::watch {
namespace {

// Intervals between a rank's warning and what it gives up. Closed connections end the waits of
// other ranks too, and these are to warn before.
constexpr int kGrace = 2;

}  // namespace

std::int64_t Detector::reach(Rendezvous what, const std::string& described, Time now) {
  const std::int64_t number = ++come_[what];
  if (taken_back_) return number;
  if (what == Rendezvous::kOperation) {
    own_.issue(described);
  } else {
    ++own_.reached[what];
  }
  left_.reset();
  end_wait(now);
  return number;
}

void Detector::leave(const std::string& described, Time now) {
  left_ = {num_operations(), described};
  end_wait(now);
}

void Detector::begin_wait(Rendezvous what, std::int64_t number, std::string where, Time now) {
  begin(now);
  own_.awaited = what;
  own_.number = number;
  own_.where = std::move(where);
  host_waits_ = true;
  device_waits_ = false;
}

void Detector::end_wait(Time now) {
  begin(now);
  rest();
}

void Detector::begin(Time now) {
  ++wait_;
  begun_ = now;
  next_slow_ = slow_after_;
}

// Without a wait in dmuon, a rank waits where it has left to, or for nobody.
void Detector::rest() {
  host_waits_ = device_waits_ = false;
  own_.awaited.reset();
  if (!left_) return;
  own_.awaited = Rendezvous::kOperation;
  std::tie(own_.number, own_.where) = *left_;
}

bool Detector::become_over(const std::string& why) {
  if (!own_.over.empty()) return false;
  own_.over = why;
  return true;
}

bool Detector::end(const std::string& why, bool failed) {
  host_knows_ = true;
  if (failed && unraised_.empty()) raised();  // else the raised error is a consequence
  if (!become_over(why)) return false;
  if (failed && host_waits_ && own_.awaited != Rendezvous::kOperation)
    own_.reached[*own_.awaited] = own_.number - 1;
  return true;
}

void Detector::end_after(std::int64_t operation, std::int64_t update, const std::string& why) {
  if (!has_raised_ && unraised_.empty()) unraised_ = why;
  if (!become_over(why)) return;
  taken_back_ = true;
  own_.take_back_to(operation);
  std::int64_t& updates = own_.reached[Rendezvous::kUpdate];
  updates = std::min(updates, update);
}

Report Detector::report(std::int64_t now_ms) const {
  Report report = own_;
  report.stored_ms = now_ms;
  return report;
}

std::string Detector::error() const {
  if (!late_.empty()) return late_;
  if (diagnosis_.empty()) return {};
  const std::string own = taken_back_ ? "; this rank is over itself: " + own_.over : "";
  return "dmuon: ranks wait for each other in vain: " + diagnosis_ + own;
}

// A wait that has just begun mostly ends by itself.
bool Detector::begin_interval(bool has_device) {
  unchanged_ = std::exchange(seen_wait_, wait_) == wait_;
  return unchanged_ && has_device && !host_waits_ && own_.over.empty();
}

void Detector::see_device(std::optional<Stuck> stuck, Time now) {
  if (seen_wait_ != wait_) return;
  rest();
  if (!stuck) oldest_.reset();
  if (!stuck) return;
  if (!oldest_ || oldest_->first != stuck->number) oldest_ = {stuck->number, now};
  device_waits_ = true;
  own_.awaited = Rendezvous::kOperation;
  own_.number = stuck->number;
  own_.where = std::move(stuck->what) + ", on its device";
}

bool Detector::raises_alarm(Time now) {
  stays_ = unchanged_ && seen_wait_ == wait_ && own_.awaited;
  const bool is_slow = stays_ && host_waits_ && now - begun_ >= next_slow_;
  if (is_slow) {
    slow_wait_ = wait_;
    next_slow_ *= 2;
  }
  raises_ = (stays_ && std::exchange(raised_for_, wait_) != wait_) || is_slow;
  return raises_;
}

Detector::Next Detector::see_alarm(std::int64_t alarm, bool published, std::int64_t diagnosed) {
  alarms_ = {alarm, alarms_[0], alarms_[1]};
  return {.stores_report = !raises_ && alarms_[0] != alarms_[1],
          .reads_diagnosis = published && diagnosis_.empty(),
          .claims = !published && stays_ && (raises_ || diagnosed < alarms_[2]),
          .answered = alarms_[2]};
}

Detector::Conclusion Detector::conclude(std::vector<Report> reports, std::string diagnosis,
                                        Time now, std::int64_t now_ms) {
  const bool complete = !reports.empty() && !raises_;  // all that saw the last alarm have stored
  if (!reports.empty()) reports_ = std::move(reports);
  if (diagnosis_.empty()) diagnosis_ = std::move(diagnosis);
  if (complete && diagnosis_.empty() && slow_wait_ == wait_) return {slow_warning(now, now_ms)};
  if (is_late(now)) return {error(), true};
  // Outside of dmuon nothing of dmuon's can raise, and an error there names no ranks.
  const bool outside = stays_ && left_ && !host_knows_ && own_.where == left_->second;
  if (diagnosis_.empty() || !(outside || device_waits_)) return {};
  ++num_in_vain_;
  return {num_in_vain_ == 1 ? error() : "", num_in_vain_ == 1 + kGrace};
}

bool Detector::is_late(Time now) {
  if (!device_waits_ || !error().empty() || now - oldest_->second < device_timeout_) return false;
  const auto seconds = std::chrono::duration<double>(device_timeout_).count();
  late_ = core::message("dmuon: the device of rank ", rank_, " of the mesh has waited in ",
                        own_.where, " (operation ", own_.number, "), for ", seconds,
                        " s, the timeout of dedicate_params: a rank has died, hangs or is late.");
  return true;
}

// Others may still come, so nothing raises. They never come if one rank alone has made a collective
// call.
std::string Detector::slow_warning(Time now, std::int64_t now_ms) {
  slow_wait_ = 0;
  if (!awaits_others(reports_, rank_)) return {};  // all have come, and the operation is slow
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - begun_);
  const bool is_call = own_.awaited && *own_.awaited != Rendezvous::kOperation;
  return core::message("dmuon: rank ", rank_, " of the mesh has waited for ", waited.count(),
                       " s for ", own_.where,
                       ", and waits until the timeout if others never come. ",
                       is_call ? "Expected: the same call on every rank. " : "",
                       attendance(reports_, rank_, now_ms));
}

std::vector<Report> Detector::table() const {
  std::vector<Report> reports = reports_;
  reports[rank_] = own_;
  reports[rank_].over.clear();
  return reports;
}

}  // namespace dmuon::watch
