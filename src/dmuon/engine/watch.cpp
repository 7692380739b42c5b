#include "dmuon/engine/watch.h"

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"

namespace dmuon::engine {
namespace {

constexpr std::size_t kMostIssued = 256;  // more than are ever in flight

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
  return ++own_.reached[static_cast<std::size_t>(what)];
}

void Watch::wait(Rendezvous what, std::int64_t number, const std::string& where,
                 const std::function<bool(std::chrono::milliseconds)>& turn) {
  if (turn(std::chrono::milliseconds(0))) return;
  const Waiting waiting(this, what, number, where);
  try {
    while (!turn(std::chrono::milliseconds(200))) waiting.check();
  } catch (const core::CommError& error) {
    give_up_();
    over(error.what());
    throw;
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
  watch_->own_.awaited.reset();
  watch_->dirty_ = true;
}

void Watch::Waiting::check() const {
  const std::scoped_lock lock(watch_->mutex_);
  if (!watch_->in_vain_.empty())
    throw core::CommError("dmuon: ranks wait for each other in vain: " + watch_->in_vain_);
}

void Watch::over(const std::string& why) {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable() || !own_.over.empty()) return;
  own_.over = why;
  dirty_ = true;
  changed_->notify_all();
  changed_->wait_for(lock, 2 * interval_, [this] { return !dirty_; });  // told, if it can be
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    changed_->wait_for(lock, interval_, [this] { return ends_ || (!own_.over.empty() && dirty_); });
    try {
      if (!exchange(lock)) continue;
    } catch (const std::exception&) {
      return;  // no store, no watch
    }
    if (own_.awaited && in_vain_.empty()) {
      reports_[rank_] = own_;
      in_vain_ = in_vain(reports_, rank_);
    }
  }
}

// Tells what has changed and, while this rank waits, reads what the others tell.
bool Watch::exchange(std::unique_lock<std::mutex>& lock) {
  const bool tells = std::exchange(dirty_, false);
  const std::string text = tells ? to_text(own_) : "";
  const bool reads = own_.awaited.has_value();
  lock.unlock();
  std::vector<std::vector<std::uint8_t>> texts;
  if (tells) store_->set(keys_[rank_], std::vector<std::uint8_t>(text.begin(), text.end()));
  const bool all = reads && store_->check(keys_);
  if (all) texts = store_->multiGet(keys_);
  lock.lock();
  changed_->notify_all();
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    reports_[rank] = report_from({texts[rank].begin(), texts[rank].end()});
  return all;
}

}  // namespace dmuon::engine
