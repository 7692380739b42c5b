#include "dmuon/engine/watch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <tuple>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"

namespace dmuon::engine {
namespace {

constexpr std::size_t kMostIssued = 256;  // more than are ever in flight
const std::string kInVain = "dmuon: ranks wait for each other in vain: ";

std::int64_t wall_clock_ms() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count();
}

}  // namespace

Watch::Watch(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::function<void()> give_up, std::chrono::milliseconds interval)
    : reports_(static_cast<std::size_t>(size)),
      rank_(static_cast<std::size_t>(rank)),
      give_up_(std::move(give_up)),
      interval_(interval),
      process_(getpid()) {
  if (!store || size == 1) return;
  store_ = store->clone();
  for (int other = 0; other < size; ++other) keys_.push_back(core::message("dmuon watch ", other));
  thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  if (!thread_.joinable()) return;
  if (getpid() != process_) {
    thread_.detach();
    changed_.release();  // whose end would wait for the thread, which a forked child does not have
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
  }
  changed_->notify_all();
  thread_.join();
}

std::int64_t Watch::reach(Rendezvous what, const std::string& described) {
  const std::scoped_lock lock(mutex_);
  if (what == Rendezvous::kOperation) {
    core::Hasher hasher;
    if (!own_.issued.empty()) hasher.add(static_cast<std::int64_t>(own_.issued.back().hash));
    own_.issued.push_back({hasher.add(described).value(), described});
    if (own_.issued.size() > kMostIssued) own_.issued.pop_front();
  }
  dirty_ = true;
  left_.reset();  // it has come back from where it left to
  await_outside();
  return ++own_.reached[static_cast<std::size_t>(what)];
}

std::int64_t Watch::num_operations() {
  const std::scoped_lock lock(mutex_);
  return own_.reached[static_cast<std::size_t>(Rendezvous::kOperation)];
}

void Watch::leave(const std::string& described) {
  const std::int64_t number = reach(Rendezvous::kOperation, described);
  const std::scoped_lock lock(mutex_);
  left_ = {number, described};
  await_outside();
}

// What is left to await when this rank waits for nothing of dmuon's.
void Watch::await_outside() {
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
    throw core::CommError(error.what() + waiting->attendance());
  }
}

Watch::Waiting::Waiting(Watch* watch, Rendezvous what, std::int64_t number, std::string where)
    : watch_(watch) {
  const std::scoped_lock lock(watch_->mutex_);
  watch_->own_.awaited = what;
  watch_->own_.number = number;
  watch_->own_.where = std::move(where);
  watch_->dirty_ = true;
}

Watch::Waiting::~Waiting() {
  const std::scoped_lock lock(watch_->mutex_);
  watch_->await_outside();
  watch_->dirty_ = true;
}

void Watch::Waiting::check() const {
  std::string why;
  {
    const std::scoped_lock lock(watch_->mutex_);
    why = watch_->in_vain_;
  }
  if (why.empty()) return;
  why = kInVain + why;
  watch_->give_up_();
  watch_->over(why);
  throw core::CommError(why);
}

std::string Watch::Waiting::attendance() const {
  Watch& watch = *watch_;
  if (!watch.thread_.joinable() || getpid() != watch.process_) return {};
  const auto patience = 2 * watch.interval_;
  std::unique_lock lock(watch.mutex_);
  // A rank tells within an interval what it has come to: where a wait fails at once, none is named
  // that is here but has not told yet.
  watch.changed_->wait_until(lock, began_ + patience, [&] { return watch.lost_; });
  const std::int64_t asked = ++watch.num_asked_;
  watch.changed_->notify_all();
  const bool ended = watch.changed_->wait_for(
      lock, patience, [&] { return watch.lost_ || watch.num_answered_ >= asked; });
  std::vector<Report> reports = watch.reports_;
  reports[watch.rank_] = watch.own_;
  reports[watch.rank_].over.clear();  // which the error says already
  const bool answered = ended && !watch.lost_;
  lock.unlock();
  return "\n" + engine::attendance(reports, watch.rank_, wall_clock_ms()) +
         (answered ? "" : "\n  (the store does not answer: what ranks told since is unknown)");
}

void Watch::over(const std::string& why) {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable() || !own_.over.empty()) return;
  own_.over = why;
  dirty_ = true;
  changed_->notify_all();
  changed_->wait_for(lock, 2 * interval_,
                     [this] { return !dirty_ || lost_; });  // told, if it can be
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    changed_->wait_for(lock, interval_, [this] {
      return ends_ || (!own_.over.empty() && dirty_) || num_answered_ < num_asked_;
    });
    try {
      if (!exchange(lock)) continue;
    } catch (const std::exception&) {  // no store, no watch
      if (!lock.owns_lock()) lock.lock();
      lost_ = true;
      changed_->notify_all();
      return;
    }
    if (own_.awaited && in_vain_.empty()) {
      reports_[rank_] = own_;
      in_vain_ = in_vain(reports_, rank_);
      // Where it is, nothing of dmuon's can raise; what raises there in the end has no names.
      if (left_ && own_.where == left_->second && !in_vain_.empty()) TORCH_WARN(kInVain, in_vain_);
    }
  }
}

// Tells what has changed and, while this rank waits, reads what the others tell.
// @returns whether it has read what all of them have told.
bool Watch::exchange(std::unique_lock<std::mutex>& lock) {
  const bool tells = std::exchange(dirty_, false);
  if (tells) own_.told_ms = wall_clock_ms();
  const std::string text = tells ? to_text(own_) : "";
  const std::int64_t asked = num_asked_;
  const bool must = num_answered_ < asked;
  // Not where it has only just come to wait: it mostly goes on.
  const bool stays = own_.awaited && std::exchange(looked_at_, own_.number) == own_.number;
  const bool reads = stays || must;
  lock.unlock();
  std::vector<std::vector<std::uint8_t>> texts(keys_.size());
  if (tells) store_->set(keys_[rank_], std::vector<std::uint8_t>(text.begin(), text.end()));
  const bool all = reads && store_->check(keys_);
  if (all) {
    texts = store_->multiGet(keys_);
  } else if (must) {
    for (std::size_t rank = 0; rank < keys_.size(); ++rank)
      if (store_->check({keys_[rank]})) texts[rank] = store_->get(keys_[rank]);
  }
  lock.lock();
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty())
      reports_[rank] = report_from({texts[rank].begin(), texts[rank].end()});
  }
  num_answered_ = asked;
  changed_->notify_all();
  return all;
}

}  // namespace dmuon::engine
