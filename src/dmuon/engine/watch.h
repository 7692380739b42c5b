#pragma once

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

#include "dmuon/engine/report.h"

namespace dmuon::engine {

/// Finds out, while ranks wait for each other, whether they do so in vain, so that a disagreement
/// is an error on every rank within seconds and not a timeout. A thread tells the others, through a
/// store, what this rank has come to and what it waits for; while it waits, it reads theirs.
///
/// Thread-safe; in a forked child it does nothing. Where the store cannot be reached nothing is
/// found out; timeouts remain.
class Watch {
 public:
  /// @param store     null: a rank alone, which waits for nobody. Else its own connection is made.
  /// @param give_up   called where a wait is in vain: nothing can be sent afterwards.
  /// @param interval  between two looks.
  Watch(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      std::function<void()> give_up = [] {},
      std::chrono::milliseconds interval = std::chrono::milliseconds(500));
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  /// This rank comes to its next. @return its number.
  std::int64_t reach(Rendezvous what, const std::string& described);

  /// The number of the newest operation that this rank has come to.
  std::int64_t num_operations();

  /// This rank comes to something that it does outside of dmuon, with all others: until it comes to
  /// anything else it may be waiting there. Numbered with the operations, so it must lie at the
  /// same place between them on every rank.
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

    /// Who has not come, and what each rank told last: what the store holds, or, where it does not
    /// answer in time, what is known. Empty for a rank alone.
    std::string attendance() const;

   private:
    Watch* watch_;
    std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  };

  /// This rank comes to nothing more; others that wait for it raise.
  void over(const std::string& why);

 private:
  void run();
  bool exchange(std::unique_lock<std::mutex>& lock);
  void await_outside();

  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  Report own_;
  // What it has left to, by number and words, if it has not come back.
  std::optional<std::pair<std::int64_t, std::string>> left_;
  std::int64_t looked_at_ = -1;  // the number awaited at the last look
  bool dirty_ = true;
  bool ends_ = false;
  bool lost_ = false;           // the store
  std::int64_t num_asked_ = 0;  // how often the thread was asked to read
  std::int64_t num_answered_ = 0;
  std::string in_vain_;
  std::vector<Report> reports_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::size_t rank_;
  std::vector<std::string> keys_;
  std::function<void()> give_up_;
  std::chrono::milliseconds interval_;
  pid_t process_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace dmuon::engine
