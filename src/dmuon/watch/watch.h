#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "dmuon/watch/board.h"
#include "dmuon/watch/report.h"

namespace dmuon::watch {

/// An operation that a device has not come past, by its number and in words.
struct Stuck {
  std::int64_t number = 0;
  std::string what;
};

/// Finds out, while ranks wait for each other, whether they do so in vain, so that a disagreement
/// is an error on every rank within seconds and not a timeout.
///
/// A thread looks at the Board once an interval. While nobody waits for longer than that, it only
/// listens to the bell: one request of some bytes. A rank that waits at two looks in a row tells
/// what it has come to and what it waits for, and rings, once for that wait; who hears a ring tells
/// too. One of those that wait so long then reads what all have told, and judges for all: when it
/// has rung itself, and two looks after a ring, when all have told. A verdict is heard like a ring,
/// and every rank that waits, or comes to wait later, raises it.
///
/// Where a wait is not known to be in vain and lasts, one of those that wait tells in a warning who
/// has not come: after ten seconds, and after each time twice as long. All that wait ring again
/// then.
///
/// A device with streams blocks the host wherever it waits for it, in the user's code too. So where
/// a rank does not wait for anybody and comes to nothing new, the thread asks how far its device
/// is: a rank whose device is stuck in an operation waits for it. Of that nobody could raise: the
/// thread warns, and gives up what the device waits for, so that the host comes on and raises next.
///
/// Thread-safe; in a forked child it does nothing. Where the store cannot be reached nothing is
/// found out; timeouts remain.
class Watch {
 public:
  /// @param store     null: a rank alone, which waits for nobody. Else its own connection is made.
  /// @param give_up   called where a wait is in vain, with the reason: nothing can be sent
  ///                  afterwards.
  /// @param interval  between two looks, or more: ranks together look at most 2,000 times a second.
  Watch(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      std::function<void(const std::string& why)> give_up = [](const std::string&) {},
      std::chrono::milliseconds interval = std::chrono::milliseconds(500),
      std::chrono::milliseconds slow_after = std::chrono::seconds(10));
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  /// From now on `device` tells of the oldest operation that this rank's device has not come past.
  void look_at(std::function<std::optional<Stuck>()> device);

  /// This rank comes to its next. @return its number.
  std::int64_t reach(Rendezvous what, const std::string& described);

  /// The number of the newest operation that this rank has come to.
  std::int64_t num_operations();

  /// From now on this rank is in a pass of the model; between two, in an empty one. For people.
  void enter(const std::string& pass);

  /// This rank comes to something that it does outside of dmuon, with all others: until it comes to
  /// anything else it may be waiting there. Numbered with the operations, so it must lie at the
  /// same place between them on every rank.
  /// @throws CommError if what the device waited for has been given up.
  void leave(const std::string& described);

  /// Waits in short turns until `turn` is true.
  /// @param what, number  that this rank has come to, and all others must.
  /// @param where         what that is, for people; called if there is something to say.
  /// @param turn          blocks for about as long as it is told; whether it has come.
  /// @throws CommError if it is in vain; every rank that waits hears of it. To this one, and to one
  ///                   of `turn`, the attendance is added, which takes up to 4 intervals.
  void wait(Rendezvous what, std::int64_t number, const std::function<std::string()>& where,
            const std::function<bool(std::chrono::milliseconds)>& turn);

  /// While it exists this rank waits for that number.
  class Waiting {
   public:
    Waiting(Watch* watch, Rendezvous what, std::int64_t number, std::string where);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    /// @throws CommError if it is in vain; every rank that waits hears of it.
    void check() const;

    /// Who has not come, and what each rank says when it is asked now: or, where the store does not
    /// answer in time, what is known. Empty for a rank alone.
    std::string attendance() const;

   private:
    Watch* watch_;
  };

  /// This rank comes to nothing more; others that wait for it raise.
  void over(const std::string& why);

 private:
  using Time = std::chrono::steady_clock::time_point;

  void run();
  void look(std::unique_lock<std::mutex>& lock);
  void look_at_device(std::unique_lock<std::mutex>& lock);
  void give_up_device(std::unique_lock<std::mutex>& lock);
  void answer(std::unique_lock<std::mutex>& lock);
  bool ask(std::unique_lock<std::mutex>& lock, bool* what, Time end);
  Report report() const;
  void warn_of_slow_wait();
  void await_outside();
  void begin_wait();
  void rest();
  bool is_watched() const;

  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  Report own_;
  // What it has left to, by number and words, if it has not come back.
  std::optional<std::pair<std::int64_t, std::string>> left_;
  bool host_waits_ = false;                       // in this class
  bool device_waits_ = false;                     // as far as it was asked
  std::function<std::optional<Stuck>()> device_;  // what it waits for
  std::int64_t wait_ = 0;       // the number of this wait, or of what comes between two
  Time begun_;                  // when it began
  std::int64_t looked_at_ = 0;  // the wait at the last look
  std::int64_t rung_for_ = 0;   // the newest wait for which this rank has rung
  std::int64_t slow_wait_ = 0;  // the wait for which this rank has rung once more
  bool ends_ = false;
  bool lost_ = false;  // the store
  // What the thread is asked to do at once: to tell and ring, to read all reports.
  bool asks_ring_ = false;
  bool asks_reports_ = false;
  std::int64_t num_asked_ = 0;
  std::int64_t num_answered_ = 0;
  std::string in_vain_;
  std::string given_up_;  // why what the device waited for was, with the attendance
  bool warned_ = false;
  std::vector<Report> reports_;          // as they were read last
  std::optional<Board> board_;           // the thread's
  std::array<std::int64_t, 3> heard_{};  // what the bell showed at the last looks, newest first
  std::size_t rank_;
  std::function<void(const std::string& why)> give_up_;
  std::chrono::milliseconds interval_;
  std::chrono::milliseconds slow_after_;  // how long a wait lasts of which nobody has been told
  pid_t process_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace dmuon::watch
