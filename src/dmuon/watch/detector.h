#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/watch/report.h"

namespace dmuon::watch {

/// Longer than any training, and short enough for sums of times.
inline constexpr std::chrono::milliseconds kNoTimeout = std::chrono::hours(24 * 365);

/// An operation that a device has not finished.
struct Stuck {
  std::int64_t number = 0;
  std::string what;  ///< in words
};

/// Decides for one rank, once an interval, what it does to find out whether ranks wait for each
/// other in vain. Has no thread, mutex, store or clock: Watch has these, and carries out what the
/// detector returns.
///
///   if (detector.begin_interval(has_device)) detector.see_device(oldest_operation(), now);
///   const bool raises = detector.raises_alarm(now);           // store a report, raise the alarm
///   const auto next = detector.see_alarm(alarm, published, diagnosed);
///   const auto result = detector.conclude(reports, diagnosis, now, now_ms);
///
/// The protocol:
/// 1. Every interval each rank reads the alarm counter.
/// 2. A rank whose wait spans two intervals stores its report and increments the counter, once per
///    wait. It also claims to diagnose.
/// 3. A rank that sees the counter change stores its report.
/// 4. Two intervals after an alarm all ranks have stored. If nobody has diagnosed since, each
///    waiting rank claims; one of them is granted. It reads all reports and publishes a diagnosis,
///    if ranks wait in vain.
/// 5. Every rank that sees a published diagnosis reads it. Every rank that waits, then or later,
///    raises it.
///
/// All stuck ranks have stored a report before the last of them raises the alarm. So that rank
/// knows all, unless another rank's claim came between. Step 4 covers this case, and ranks that
/// have issued something else and wait for nobody. A rank that dies between its claim and its
/// diagnosis takes the diagnosis with it, until the next alarm.
///
/// Slow waits: a wait of `slow_after`, then of twice as long, and so on, raises the alarm again. If
/// it is not in vain, the rank that diagnoses returns a warning that names the missing ranks.
///
/// Outside of dmuon nothing can raise: in the host framework's collectives, after leave(), or where
/// a host blocks on its device. So if a rank waits for nobody and comes to nothing new, the caller
/// asks its device. A rank whose device is stuck in an operation waits for that operation. If a
/// wait outside is in vain, conclude() returns a warning, and then says to give up what it waits
/// for; then the host goes on and raises. conclude() says so too if the device's oldest operation
/// stays the same for the timeout of its messages, because NCCL's watchdog does not see messages
/// that are grouped.
class Detector {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// @param size  ranks of the mesh.
  Detector(std::size_t rank, std::size_t size, std::chrono::milliseconds slow_after)
      : rank_(rank), slow_after_(slow_after), reports_(size) {}

  /// Sets the time after which a device is given up that does not finish an operation.
  void set_device_timeout(std::chrono::milliseconds timeout) { device_timeout_ = timeout; }

  // ---- The rank's program ----

  /// The rank comes to its next rendezvous of a kind. Returns the rendezvous' number.
  std::int64_t reach(Rendezvous what, const std::string& described, Time now);
  /// The rank waits for others in its newest operation, outside of dmuon, until it reaches another
  /// rendezvous. Waits of begin_wait() may come between.
  void leave(const std::string& described, Time now);
  void begin_wait(Rendezvous what, std::int64_t number, std::string where, Time now);
  void end_wait(Time now);
  void enter(const std::string& pass) { own_.pass = pass; }
  /// The rank comes to nothing more. Returns false if it was over before.
  /// @param failed  True if its wait has failed by itself. Then it counts as not come to the
  ///                comparison, agreement or update in which it waits: these pass words or slices
  ///                on from rank to rank, so others may wait for them still.
  bool end(const std::string& why, bool failed = false);
  /// An error has been raised on the host, as end() says too. So it waits nowhere outside of dmuon.
  void raised() {
    host_knows_ = has_raised_ = true;
    unraised_.clear();
  }
  /// As end(). Takes back what the rank has come to beyond these numbers, because some of it may
  /// not happen. Later ones do not count either. But they have their numbers, so that a wait of
  /// this rank misses others that never come.
  void end_after(std::int64_t operation, std::int64_t update, const std::string& why);

  /// Returns the reason why the rank is over; empty if it is not.
  const std::string& failure() const { return own_.over; }
  /// Returns the first error that end_after() was given. Empty if any error has been raised.
  const std::string& unraised() const { return unraised_; }
  Report report(std::int64_t now_ms) const;
  /// Returns the number of operations that the rank has come to, also of those taken back.
  std::int64_t num_operations() const { return come_[Rendezvous::kOperation]; }
  /// Returns the hash of all operations that the rank has come to and not taken back.
  std::uint64_t hash() const { return own_.hashes.empty() ? 0 : own_.hashes.back(); }
  /// Returns the error of this rank's waits if they are in vain, or its device is late; else empty.
  std::string error() const;

  // ---- One interval, in this order ----

  /// Returns true if the caller must ask the device for its oldest unfinished operation.
  bool begin_interval(bool has_device);
  /// Without effect if the rank has come to something new since begin_interval().
  void see_device(std::optional<Stuck> stuck, Time now);

  /// Returns true if the rank stores its report and then increments the alarm counter. If false, it
  /// only reads the counter.
  bool raises_alarm(Time now);

  struct Next {
    bool stores_report = false;
    bool reads_diagnosis = false;
    bool claims = false;        ///< if granted: reads all reports and publishes in_vain() of them
    std::int64_t answered = 0;  ///< the alarm for which all ranks have stored their reports
  };
  /// @param alarm      the counter after raises_alarm().
  /// @param published  true if a diagnosis is there.
  /// @param diagnosed  the alarm of the newest claim that this rank knows.
  Next see_alarm(std::int64_t alarm, bool published, std::int64_t diagnosed);

  struct Conclusion {
    std::string warning;    ///< for the user; empty: none
    bool gives_up = false;  ///< nothing can raise: give up what the device waits for
  };
  /// @param reports    empty if none were read.
  /// @param diagnosis  read or made in this interval; else empty.
  Conclusion conclude(std::vector<Report> reports, std::string diagnosis, Time now,
                      std::int64_t now_ms);

  // ---- Tables for errors ----

  void set_reports(std::vector<Report> reports) { reports_ = std::move(reports); }
  /// Returns the reports that were read last, and this rank's of now. This rank is not over in it:
  /// the error says so already.
  std::vector<Report> table() const;

 private:
  bool become_over(const std::string& why);  // returns false if it was over before
  void begin(Time now);
  void rest();
  bool is_late(Time now);
  std::string slow_warning(Time now, std::int64_t now_ms);

  std::size_t rank_;
  Report own_;
  decltype(Report::reached) come_{};  // as own_.reached, but nothing is taken back
  /// The operation in which it has left, by number and words.
  std::optional<std::pair<std::int64_t, std::string>> left_;
  bool taken_back_ = false;  // by end_after()
  bool has_raised_ = false;  // any error, on the host
  std::string unraised_;
  bool host_knows_ = false;      // that the rank is over; an update's lane may have ended it
  bool host_waits_ = false;      // in begin_wait()
  bool device_waits_ = false;    // at the last see_device()
  std::int64_t wait_ = 0;        // counts waits and the times between them
  Time begun_;                   // of the wait
  std::int64_t seen_wait_ = 0;   // at begin_interval()
  bool unchanged_ = false;       // since the interval before
  bool stays_ = false;           // in a wait that spans two intervals
  bool raises_ = false;          // the alarm, in this interval
  std::int64_t raised_for_ = 0;  // the newest wait for which this rank has raised the alarm
  std::int64_t slow_wait_ = 0;   // the wait for which it has raised the alarm once more
  std::chrono::milliseconds slow_after_;   // a wait of this length gets a warning
  std::chrono::milliseconds next_slow_{};  // and when it has this length, the next one
  std::array<std::int64_t, 3> alarms_{};   // the counter in the last intervals, newest first
  std::optional<std::pair<std::int64_t, Time>> oldest_;  // the device's operation, and since when
  std::chrono::milliseconds device_timeout_ = kNoTimeout;
  std::string late_;  // the error of a device that was late
  std::string diagnosis_;
  int num_in_vain_ = 0;  // intervals in which it waited outside of dmuon, and knew the diagnosis
  std::vector<Report> reports_;
};

}  // namespace dmuon::watch
