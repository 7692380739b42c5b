#include "dmuon/watch/watch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::watch {
namespace {

using std::chrono::steady_clock;

constexpr int kLooksPerMs = 2;  // of all ranks together

std::int64_t wall_clock_ms() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count();
}

}  // namespace

Watch::Watch(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::function<void(const std::string& why)> give_up,
             std::chrono::milliseconds interval, std::chrono::milliseconds slow_after)
    : detector_(static_cast<std::size_t>(rank), static_cast<std::size_t>(size), slow_after),
      rank_(static_cast<std::size_t>(rank)),
      give_up_(std::move(give_up)),
      interval_(std::max(interval, std::chrono::milliseconds(size / kLooksPerMs))) {
  if (!store || size == 1) return;
  board_.emplace(store, rank_, static_cast<std::size_t>(size));
  service_.start("dmuon watch", [this] { run(); });
}

void Watch::look_at(Outside outside) {
  const Lock lock = service_.lock();
  detector_.set_device_timeout(outside.timeout);
  outside_ = std::move(outside);
}

void Watch::look_away() {
  const Lock lock = service_.lock();
  outside_.reset();
}

void Watch::raised() {
  const Lock lock = service_.lock();
  detector_.raised();
}

std::int64_t Watch::reach(Rendezvous what, const std::string& described) {
  const Lock lock = service_.lock();
  return detector_.reach(what, described, steady_clock::now());
}

void Watch::enter(const std::string& pass) {
  const Lock lock = service_.lock();
  detector_.enter(pass);
}

std::int64_t Watch::num_operations() {
  const Lock lock = service_.lock();
  return detector_.num_operations();
}

std::uint64_t Watch::hash() {
  const Lock lock = service_.lock();
  return detector_.hash();
}

void Watch::leave(const std::string& described) {
  const Lock lock = service_.lock();
  detector_.reach(Rendezvous::kOperation, described, steady_clock::now());
  if (!given_up_.empty()) {
    detector_.raised();
    throw core::CommError(given_up_);
  }
  detector_.leave(described, steady_clock::now());
}

void Watch::wait(Rendezvous what, std::int64_t number, const std::function<std::string()>& where,
                 const std::function<bool(std::chrono::milliseconds)>& turn) {
  std::optional<Waiting> waiting;
  try {
    if (turn(std::chrono::milliseconds(0))) return;
    waiting.emplace(this, what, number, where());
    while (!turn(std::chrono::milliseconds(200))) waiting->check();
  } catch (const core::CommError& error) {
    if (!waiting) waiting.emplace(this, what, number, where());
    const std::string text = error.what() + waiting->attendance();
    end([&](Detector* of) { of->end(error.what(), /*failed=*/true); });
    // Nothing can be sent any more, even if the caller catches this. Comes last: it may wait for a
    // device.
    give_up_(error.what());
    throw core::CommError(text);
  } catch (const std::exception& error) {  // of an operation of this rank, whose lane ends with it
    if (!waiting) waiting.emplace(this, what, number, where());
    end([&](Detector* of) {
      of->end(error.what(), /*failed=*/true);
      of->raised();  // a late update's own error comes here, too
    });
    throw;
  }
}

Watch::Waiting::Waiting(Watch* watch, Rendezvous what, std::int64_t number, std::string where)
    : watch_(watch) {
  const Lock lock = watch_->service_.lock();
  watch_->detector_.begin_wait(what, number, std::move(where), steady_clock::now());
}

Watch::Waiting::~Waiting() {
  const Lock lock = watch_->service_.lock();
  watch_->detector_.end_wait(steady_clock::now());
}

void Watch::Waiting::check() const {
  std::string why;
  {
    const Lock lock = watch_->service_.lock();
    why = watch_->detector_.error();
  }
  if (why.empty()) return;
  watch_->raised();
  watch_->over(why);
  watch_->give_up_(why);
  throw core::CommError(why);
}

std::string Watch::Waiting::attendance() const {
  Watch& watch = *watch_;
  if (!watch.service_.runs()) return {};
  const Detector::Time begin = steady_clock::now();
  const Detector::Time end = begin + 4 * watch.interval_;
  Lock lock = watch.service_.lock();
  bool answered = watch.ask(lock, &watch.asks_alarm_, end);
  if (answered) {
    // All others store their reports within an interval, and half of one more if they are busy.
    watch.service_.changed().wait_until(lock, begin + 3 * watch.interval_ / 2,
                                        [&] { return watch.lost_; });
    answered = watch.ask(lock, &watch.asks_reports_, end);
  }
  const std::vector<Report> reports = watch.detector_.table();
  lock.unlock();
  return "\n" + watch::attendance(reports, watch.rank_, wall_clock_ms(), answered);
}

bool Watch::over(const std::string& why) {
  return end([&](Detector* of) { of->end(why); });
}

std::string Watch::failure() {
  const Lock lock = service_.lock();
  return detector_.failure();
}

std::string Watch::unraised() {
  const Lock lock = service_.lock();
  return detector_.unraised();
}

bool Watch::over_after(std::int64_t operation, std::int64_t update, const std::string& why) {
  return end([&](Detector* of) { of->end_after(operation, update, why); });
}

bool Watch::end(const std::function<void(Detector*)>& tell) {
  Lock lock = service_.lock();
  tell(&detector_);
  if (!service_.runs()) return true;
  return ask(lock, &asks_alarm_, steady_clock::now() + 2 * interval_) || lost_;
}

// Asks the thread to carry out a request at once. Returns true if it has, before the end.
bool Watch::ask(Lock& lock, bool* what, Detector::Time end) {
  *what = true;
  const std::int64_t asked = ++num_asked_;
  service_.changed().notify_all();
  service_.changed().wait_until(lock, end, [&] { return lost_ || num_answered_ >= asked; });
  return !lost_ && num_answered_ >= asked;
}

void Watch::run() {
  Lock lock = service_.lock();
  const auto is_asked = [this] { return !lost_ && num_answered_ < num_asked_; };
  try {
    while (true) {
      service_.changed().wait_for(lock, interval_, [&] { return service_.ends() || is_asked(); });
      if (service_.ends()) return;
      if (is_asked()) {
        with_store(lock, [&] { answer(lock); });
      } else {
        look(lock);
      }
    }
  } catch (const std::exception&) {  // of the device: nothing can be watched any more
    if (!lock.owns_lock()) lock.lock();
    lose_store();
  }
}

// Without its store the watch goes on with this rank's device.
void Watch::with_store(Lock& lock, const std::function<void()>& ask) {
  if (lost_) return;
  try {
    ask();
  } catch (const std::exception&) {
    if (!lock.owns_lock()) lock.lock();
    lose_store();
  }
}

void Watch::lose_store() {
  lost_ = true;
  service_.changed().notify_all();
}

void Watch::answer(Lock& lock) {
  const std::int64_t asked = num_asked_;
  const bool raises = std::exchange(asks_alarm_, false);
  const bool reads = std::exchange(asks_reports_, false);
  const Report own = detector_.report(wall_clock_ms());
  lock.unlock();
  if (raises) {
    board_->store(own);
    board_->alarm(true);
  }
  std::vector<Report> reports;
  if (reads) reports = board_->reports();
  lock.lock();
  if (reads) detector_.set_reports(std::move(reports));
  num_answered_ = asked;
  service_.changed().notify_all();
}

// Carries out one interval of the detector.
void Watch::look(Lock& lock) {
  if (detector_.begin_interval(outside_ && outside_->oldest)) ask_device(lock);
  const bool raises = detector_.raises_alarm(steady_clock::now());
  Told told;
  with_store(lock, [&] { told = talk(lock, raises); });
  const Detector::Conclusion result = detector_.conclude(
      std::move(told.reports), std::move(told.diagnosis), steady_clock::now(), wall_clock_ms());
  if (!result.warning.empty()) {
    TORCH_WARN(result.warning);
  }
  if (result.gives_up && outside_) give_up_outside(lock);
}

// No request to the store holds the mutex.
Watch::Told Watch::talk(Lock& lock, bool raises) {
  const Report own = detector_.report(wall_clock_ms());
  lock.unlock();
  if (raises) board_->store(own);  // first: a rank that sees the alarm may read at once
  const std::int64_t alarm = board_->alarm(raises);
  lock.lock();
  const Detector::Next next =
      detector_.see_alarm(alarm, Board::is_published(alarm), board_->diagnosed());
  lock.unlock();
  if (next.stores_report) board_->store(own);
  Told told;
  if (next.reads_diagnosis) told.diagnosis = board_->diagnosis();
  if (next.claims && board_->claim(next.answered, alarm)) {
    told.reports = board_->reports();
    told.diagnosis = in_vain(told.reports);
    if (!told.diagnosis.empty()) board_->publish(told.diagnosis);
  }
  lock.lock();
  return told;
}

void Watch::ask_device(Lock& lock) {
  const auto oldest = outside_->oldest;
  lock.unlock();
  std::optional<Stuck> stuck = oldest();
  lock.lock();
  detector_.see_device(std::move(stuck), steady_clock::now());
}

void Watch::give_up_outside(Lock& lock) {
  const std::string why = detector_.error();
  const auto give_up = outside_->give_up;
  detector_.end(why);
  std::vector<Report> reports = detector_.table();
  with_store(lock, [&, own = detector_.report(wall_clock_ms())] {
    lock.unlock();
    board_->store(own);
    board_->alarm(true);
    reports = board_->reports();
    lock.lock();
  });
  reports[rank_].over.clear();  // the error says it already
  const std::string text = why + "\n" + watch::attendance(reports, rank_, wall_clock_ms(), !lost_);
  given_up_ = text;  // first: the host goes on at once
  lock.unlock();
  give_up(text);
  lock.lock();
}

}  // namespace dmuon::watch
