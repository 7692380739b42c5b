#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dmuon/core/service_thread.h"
#include "dmuon/watch/board.h"
#include "dmuon/watch/detector.h"

namespace dmuon::watch {

/// Finds out, while ranks wait for each other, whether they wait in vain. So a disagreement is an
/// error on every rank within seconds, not a timeout.
///
///   const std::int64_t number = watch.reach(Rendezvous::kOperation, "publish of 'a'");
///   watch.wait_for(event, Rendezvous::kOperation, number, [] { return "publish of 'a'"; });
///
/// A thread carries out once an interval what its Detector returns, on a Board. While no wait is
/// longer than an interval, that is one request of some bytes to the store.
///
/// Thread-safe. Does nothing in a forked child. If the store is unreachable, only timeouts end
/// waits; the device's is looked after here as before.
class Watch {
 public:
  /// @param store       null for a rank alone, which waits for nobody. Watch makes its own
  ///                    connection to it.
  /// @param give_up     called with the reason if a wait is in vain or fails: nothing can be sent
  ///                    afterwards.
  /// @param interval    or longer, so that all ranks together make at most 2,000 requests a second.
  /// @param slow_after  a wait of this length, then of twice as long and so on, gets a warning.
  Watch(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      std::function<void(const std::string& why)> give_up = [](const std::string&) {},
      std::chrono::milliseconds interval = std::chrono::milliseconds(500),
      std::chrono::milliseconds slow_after = std::chrono::seconds(10));

  /// The waits of a host outside of dmuon, where nothing can raise.
  struct Outside {
    std::function<void(const std::string& why)> give_up;  ///< ends all that the host may wait for
    /// Returns its device's oldest unfinished operation. Empty if the host has no other device.
    std::function<std::optional<Stuck>()> oldest = {};
    /// A device's operation that takes longer ends by give_up().
    std::chrono::milliseconds timeout = kNoTimeout;
  };
  /// Looks there too from now on, on the watch's thread. Call it once, before the first wait.
  void look_at(Outside outside);
  /// Gives nothing up any more. Call it after a failure, when another training begins on these
  /// ranks: what it would give up is that training's from now on.
  void look_away();

  /// Says that an error of this rank has been raised on its host, which so waits for nothing.
  void raised();

  /// This rank comes to its next rendezvous of a kind. Returns the rendezvous' number.
  std::int64_t reach(Rendezvous what, const std::string& described);

  /// Returns the number of the newest operation that this rank has come to.
  std::int64_t num_operations();

  /// Returns the hash of all operations that this rank has come to, in order.
  std::uint64_t hash();

  /// Sets the pass of the model that this rank is in, for messages; empty between two passes.
  void enter(const std::string& pass);

  /// Counts an operation outside of dmuon, which all ranks do at the same place between their
  /// operations. Until this rank comes to anything else, it may be waiting there.
  /// @throws CommError if what the host or its device waited for has been given up.
  void leave(const std::string& described);

  /// Waits in short turns until `turn` returns true.
  /// @param what, number  a rendezvous that this rank has reached, and all others must.
  /// @param where         returns the rendezvous in words; called only for messages.
  /// @param turn          blocks for at most about the given time. Returns true at the end.
  /// @throws CommError if the wait is in vain, on every rank that waits. To this error, and to one
  ///                   that `turn` throws, wait() adds the attendance; that takes up to 4
  ///                   intervals. Any other exception of `turn` ends this rank, as over() does.
  void wait(Rendezvous what, std::int64_t number, const std::function<std::string()>& where,
            const std::function<bool(std::chrono::milliseconds)>& turn);

  /// As wait(), for what has wait_for(), which returns true at its end, and wait(), which then
  /// throws its error.
  template <typename Awaited>
  void wait_for(Awaited awaited, Rendezvous what, std::int64_t number,
                const std::function<std::string()>& where) {
    wait(what, number, where, [&](std::chrono::milliseconds most) {
      if (!awaited.wait_for(most)) return false;
      awaited.wait();
      return true;
    });
  }

  /// While it exists, this rank waits for that number.
  class Waiting {
   public:
    Waiting(Watch* watch, Rendezvous what, std::int64_t number, std::string where);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    /// @throws CommError if the wait is in vain, on every rank that waits.
    void check() const;

    /// Asks all ranks for their reports. Returns the missing ranks and a line for each rank; if the
    /// store does not answer in time, from the last reports. Empty for a rank alone.
    std::string attendance() const;

   private:
    Watch* watch_;
  };

  /// This rank comes to nothing more. Other ranks that wait for it raise.
  /// @return  False if the store does not answer within 2 intervals. Then the thread waits in it,
  ///          as after a partition of the network, and the destructor would wait too.
  bool over(const std::string& why);
  /// Returns the reason why this rank is over; empty if it is not. Any thread may call it.
  std::string failure();
  /// Returns the first reason that over_after() gave. Empty if an error has been raised on this
  /// rank, unless that names another one.
  std::string unraised();
  /// As over(). Takes back what this rank has come to beyond these numbers, because some of it may
  /// not happen. Any thread may call it.
  bool over_after(std::int64_t operation, std::int64_t update, const std::string& why);

 private:
  using Lock = core::ServiceThread::Lock;

  bool end(const std::function<void(Detector*)>& tell);
  // The answers of the store in an interval.
  struct Told {
    std::vector<Report> reports;
    std::string diagnosis;
  };

  void run();
  void lose_store();
  void look(Lock& lock);
  Told talk(Lock& lock, bool raises);
  void with_store(Lock& lock, const std::function<void()>& ask);
  void ask_device(Lock& lock);
  void give_up_outside(Lock& lock);
  void answer(Lock& lock);
  bool ask(Lock& lock, bool* what, Detector::Time end);

  Detector detector_;
  std::optional<Outside> outside_;
  bool lost_ = false;  // the store
  // Requests to the thread, to carry out at once: raise the alarm, read all reports.
  bool asks_alarm_ = false;
  bool asks_reports_ = false;
  std::int64_t num_asked_ = 0;
  std::int64_t num_answered_ = 0;
  std::string given_up_;        // the error of the wait outside, with the attendance
  std::optional<Board> board_;  // the thread's
  std::size_t rank_;
  std::function<void(const std::string& why)> give_up_;
  std::chrono::milliseconds interval_;
  core::ServiceThread service_;  // last: it uses all of the above
};

}  // namespace dmuon::watch
