#include "dmuon/watch/watch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <tuple>

#include "dmuon/core/error.h"

// Longer than other files because what waits, what the thread does for it and what either may touch
// under the mutex are one protocol, and are read together.
namespace dmuon::watch {
namespace {

using std::chrono::steady_clock;

constexpr int kLooksPerMs = 2;  // of all ranks together
const std::string kInVain = "dmuon: ranks wait for each other in vain: ";

std::int64_t wall_clock_ms() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count();
}

}  // namespace

Watch::Watch(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::function<void(const std::string& why)> give_up,
             std::chrono::milliseconds interval, std::chrono::milliseconds slow_after)
    : reports_(static_cast<std::size_t>(size)),
      rank_(static_cast<std::size_t>(rank)),
      give_up_(std::move(give_up)),
      interval_(std::max(interval, std::chrono::milliseconds(size / kLooksPerMs))),
      slow_after_(slow_after),
      process_(getpid()) {
  if (!store || size == 1) return;
  board_.emplace(store, rank_, reports_.size());
  thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  if (!thread_.joinable()) return;
  if (getpid() != process_) {
    thread_.detach();
    // Its end would wait for the thread, which a forked child does not have.
    static_cast<void>(changed_.release());
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
  }
  changed_->notify_all();
  thread_.join();
}

// A forked child has a copy of the thread's handle, and no thread.
bool Watch::is_watched() const { return thread_.joinable() && getpid() == process_; }

void Watch::look_at(std::function<std::optional<Stuck>()> device) {
  const std::scoped_lock lock(mutex_);
  device_ = std::move(device);
}

std::int64_t Watch::reach(Rendezvous what, const std::string& described) {
  const std::scoped_lock lock(mutex_);
  std::int64_t& reached = own_.reached[static_cast<std::size_t>(what)];
  if (what == Rendezvous::kOperation) {
    own_.issue(described);
  } else {
    ++reached;
  }
  left_.reset();  // it has come back from where it left to
  await_outside();
  return reached;
}

void Watch::enter(const std::string& pass) {
  const std::scoped_lock lock(mutex_);
  own_.pass = pass;
}

std::int64_t Watch::num_operations() {
  const std::scoped_lock lock(mutex_);
  return own_.reached[static_cast<std::size_t>(Rendezvous::kOperation)];
}

void Watch::leave(const std::string& described) {
  const std::int64_t number = reach(Rendezvous::kOperation, described);
  const std::scoped_lock lock(mutex_);
  if (!given_up_.empty()) throw core::CommError(given_up_);
  left_ = {number, described};
  await_outside();
}

void Watch::await_outside() {
  begin_wait();
  rest();
}

void Watch::begin_wait() {
  ++wait_;
  begun_ = steady_clock::now();
}

// What is left to await when this rank waits for nothing of dmuon's.
void Watch::rest() {
  host_waits_ = device_waits_ = false;
  own_.awaited.reset();
  if (!left_) return;
  own_.awaited = Rendezvous::kOperation;
  std::tie(own_.number, own_.where) = *left_;
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
    over(error.what());      // first: to give up may wait for a device
    give_up_(error.what());  // whatever the caller makes of it, nothing can be sent any more
    throw core::CommError(text);
  }
}

Watch::Waiting::Waiting(Watch* watch, Rendezvous what, std::int64_t number, std::string where)
    : watch_(watch) {
  const std::scoped_lock lock(watch_->mutex_);
  watch_->own_.awaited = what;
  watch_->own_.number = number;
  watch_->own_.where = std::move(where);
  watch_->host_waits_ = true;
  watch_->device_waits_ = false;
  watch_->begin_wait();
}

Watch::Waiting::~Waiting() {
  const std::scoped_lock lock(watch_->mutex_);
  watch_->await_outside();
}

void Watch::Waiting::check() const {
  std::string why;
  {
    const std::scoped_lock lock(watch_->mutex_);
    why = watch_->in_vain_;
  }
  if (why.empty()) return;
  why = kInVain + why;
  watch_->over(why);
  watch_->give_up_(why);
  throw core::CommError(why);
}

std::string Watch::Waiting::attendance() const {
  Watch& watch = *watch_;
  if (!watch.is_watched()) return {};
  const Time begin = steady_clock::now();
  const Time end = begin + 4 * watch.interval_;
  std::unique_lock lock(watch.mutex_);
  bool answered = watch.ask(lock, &watch.asks_ring_, end);
  if (answered) {
    // All others tell within an interval, and the half of one more if they are busy.
    watch.changed_->wait_until(lock, begin + 3 * watch.interval_ / 2, [&] { return watch.lost_; });
    answered = watch.ask(lock, &watch.asks_reports_, end);
  }
  std::vector<Report> reports = watch.reports_;
  reports[watch.rank_] = watch.own_;
  reports[watch.rank_].over.clear();  // which the error says already
  lock.unlock();
  return "\n" + watch::attendance(reports, watch.rank_, wall_clock_ms()) +
         (answered ? "" : "\n  (the store does not answer: what ranks told since is unknown)");
}

void Watch::over(const std::string& why) {
  if (!is_watched()) return;  // a forked child may have a locked mutex, too
  std::unique_lock lock(mutex_);
  if (!own_.over.empty()) return;
  own_.over = why;
  ask(lock, &asks_ring_, steady_clock::now() + 2 * interval_);
}

// Has the thread do something at once. @returns whether it has, before the end.
bool Watch::ask(std::unique_lock<std::mutex>& lock, bool* what, Time end) {
  *what = true;
  const std::int64_t asked = ++num_asked_;
  changed_->notify_all();
  changed_->wait_until(lock, end, [&] { return lost_ || num_answered_ >= asked; });
  return !lost_ && num_answered_ >= asked;
}

Report Watch::report() const {
  Report report = own_;
  report.told_ms = wall_clock_ms();
  return report;
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  try {
    const Report first = report();
    lock.unlock();
    board_->tell(first);
    lock.lock();
    while (true) {
      changed_->wait_for(lock, interval_, [this] { return ends_ || num_answered_ < num_asked_; });
      if (ends_) return;
      if (num_answered_ < num_asked_) {
        answer(lock);
      } else {
        look(lock);
      }
    }
  } catch (const std::exception&) {  // no store, no watch
    if (!lock.owns_lock()) lock.lock();
    lost_ = true;
    changed_->notify_all();
  }
}

void Watch::answer(std::unique_lock<std::mutex>& lock) {
  const std::int64_t asked = num_asked_;
  const bool rings = std::exchange(asks_ring_, false);
  const bool reads = std::exchange(asks_reports_, false);
  const Report own = report();
  lock.unlock();
  if (rings) {
    board_->tell(own);
    board_->bell(true);
  }
  std::vector<Report> reports;
  if (reads) reports = board_->reports();
  lock.lock();
  if (reads) reports_ = std::move(reports);
  num_answered_ = asked;
  changed_->notify_all();
}

// Every rank that is stuck has told and rung for its last wait: the last to ring judges at once,
// and knows all, unless another one has claimed to judge since this one last asked. Two looks after
// a ring every rank has told, also one that has issued something else and waits for nobody: then
// somebody judges in any case. Only a rank that dies between claim and verdict takes that with it,
// until the next ring.
void Watch::look(std::unique_lock<std::mutex>& lock) {
  // Not where it has only just come to wait: it mostly goes on.
  const bool unchanged = std::exchange(looked_at_, wait_) == wait_;
  if (unchanged) look_at_device(lock);
  const bool stays = unchanged && looked_at_ == wait_ && own_.awaited;
  const bool is_slow = stays && host_waits_ && steady_clock::now() - begun_ >= slow_after_;
  if (is_slow) {
    slow_wait_ = wait_;
    slow_after_ *= 2;
  }
  const bool rings = (stays && std::exchange(rung_for_, wait_) != wait_) || is_slow;
  const bool searches = in_vain_.empty();
  const Report own = report();
  lock.unlock();
  if (rings) board_->tell(own);  // before it rings: who hears it may read at once
  heard_ = {board_->bell(rings), heard_[0], heard_[1]};
  if (!rings && heard_[0] != heard_[1]) board_->tell(own);
  std::vector<Report> reports;
  std::string verdict;
  if (searches && Board::is_published(heard_[0])) {
    verdict = board_->verdict();
  } else if (searches && stays && (rings || board_->judged() < heard_[2]) &&
             board_->claim(heard_[2], heard_[0])) {
    reports = board_->reports();
    verdict = in_vain(reports);
    if (!verdict.empty()) board_->publish(verdict);
  }
  lock.lock();
  const bool told = !reports.empty() && !rings;  // by all that have heard the last ring
  if (!reports.empty()) reports_ = std::move(reports);
  if (searches) in_vain_ = std::move(verdict);
  if (told && in_vain_.empty() && slow_wait_ == wait_) warn_of_slow_wait();
  // Where it has left, nothing of dmuon's can raise; what raises there in the end has no names.
  const bool outside = stays && left_ && own_.where == left_->second;
  if (in_vain_.empty() || !(outside || device_waits_) || std::exchange(warned_, true)) return;
  TORCH_WARN(kInVain, in_vain_);
  if (device_) give_up_device(lock);
}

// Others may come yet, so that nothing can raise; they may also never come, where one rank alone
// has called what is collective.
void Watch::warn_of_slow_wait() {
  slow_wait_ = 0;
  if (!awaits_others(reports_, rank_)) return;  // what all have come to takes its time
  const auto waited =
      std::chrono::duration_cast<std::chrono::seconds>(steady_clock::now() - begun_);
  TORCH_WARN(
      "dmuon: rank ", rank_, " of the mesh has waited for ", waited.count(),
      " s, and waits until the timeout if others never come: what is collective is called on "
      "all ranks. ",
      watch::attendance(reports_, rank_, wall_clock_ms()));
}

// A host that waits for the device waits in this class only if it has nothing else to do.
void Watch::look_at_device(std::unique_lock<std::mutex>& lock) {
  if (!device_ || host_waits_ || !own_.over.empty()) return;
  const std::int64_t wait = wait_;
  lock.unlock();
  std::optional<Stuck> stuck = device_();
  lock.lock();
  if (wait != wait_) return;  // it has come on meanwhile
  rest();
  if (!stuck) return;
  device_waits_ = true;
  own_.awaited = Rendezvous::kOperation;
  own_.number = stuck->number;
  own_.where = std::move(stuck->what) + ", on its device";
}

void Watch::give_up_device(std::unique_lock<std::mutex>& lock) {
  own_.over = kInVain + in_vain_;
  const Report own = report();
  lock.unlock();
  board_->tell(own);
  board_->bell(true);
  std::vector<Report> reports = board_->reports();
  reports[rank_].over.clear();  // which the error says already
  const std::string text = own.over + "\n" + watch::attendance(reports, rank_, wall_clock_ms());
  lock.lock();
  given_up_ = text;  // first: the host comes on at once
  lock.unlock();
  give_up_(text);
  lock.lock();
}

}  // namespace dmuon::watch
