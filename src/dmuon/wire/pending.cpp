#include "dmuon/wire/pending.h"

#include <stdexcept>

#include "dmuon/core/error.h"

namespace dmuon::wire {

void fail(const std::string& what, const std::exception& error) {
  throw core::CommError(core::message(
      "dmuon: ", what,
      " failed: a rank died, did not come within the timeout, or issued something else; ",
      "training cannot go on with this process group. Reported: ", error.what()));
}

bool InFlight::wait(const WorkPtr& work) {
  {
    const std::scoped_lock lock(mutex_);
    if (!given_up_.empty()) return false;
    works_.push_back(work);
  }
  const auto forget = [&] {
    const std::scoped_lock lock(mutex_);
    std::erase(works_, work);
    return given_up_.empty();
  };
  try {
    const bool done = work->wait();
    return forget() && done;
  } catch (...) {
    forget();
    on_failure_();
    throw;
  }
}

std::string InFlight::given_up() {
  const std::scoped_lock lock(mutex_);
  return given_up_;
}

void InFlight::give_up(const std::string& why) {
  const std::scoped_lock lock(mutex_);
  if (given_up_.empty()) given_up_ = "it was given up: " + why;
  for (const WorkPtr& work : works_) {
    try {
      work->abort();
    } catch (const std::exception&) {  // a backend that cannot: its own timeout ends the wait
    }
  }
}

std::shared_future<void> InFlight::abort_once(
    const std::function<std::shared_future<void>()>& abort) {
  const std::scoped_lock lock(mutex_);
  if (!aborted_.valid()) aborted_ = abort();
  return aborted_;
}

bool Pending::wait_for(std::chrono::milliseconds most) const {
  for (const WorkPtr& work : works_) {
    if (!work || work->isCompleted()) continue;
    if (most.count() == 0) return false;
    try {
      work->wait(most);  // throws at the end of the time, and leaves the work alone
    } catch (const std::exception&) {
      if (!work->isCompleted()) return false;
    }
  }
  return true;
}

void Pending::wait() {
  try {
    for (const WorkPtr& work : works_) {
      if (work && !in_flight_->wait(work)) throw std::runtime_error(in_flight_->given_up());
    }
  } catch (const std::exception& error) {
    fail(what_, error);
  }
  works_.clear();
}

void wait_all(std::vector<Pending> messages) {
  for (Pending& message : messages) message.wait();
}

}  // namespace dmuon::wire
