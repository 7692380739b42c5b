#pragma once

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "dmuon/schedule/trigger.h"

namespace dmuon::schedule {

/// A trigger that the step crosses now.
struct Crossing {
  Trigger trigger;
  Pass pass;
  int position;  ///< in the pass's trace; -1 if the pass follows none
  /// True if no trace foretold the crossing: every rank must confirm that it crosses the same.
  bool is_compared() const { return position < 0; }
};

/// The one order in which a rank crosses the triggers of a step, and so issues their operations.
///
/// Collectives that two ranks issue in different order abort, hang or swap data silently. So hooks
/// never choose the operations. A hook names its trigger, and the order returns the crossings:
/// - The first pass of each kind is traced. Each trigger is crossed as it comes, after ranks have
///   compared it.
/// - Later passes replay the trace. A trigger that lies ahead first crosses everything before it,
///   which the rank owes for units that it skipped.
/// - A trigger that does not lie ahead is a deviation. The rest of the pass is on demand: ranks
///   compare each trigger. The next pass of that kind is traced again.
/// - Skipping a use of a host unit (UnitLayout::host), or the end of its backward, is a deviation
///   too, right before it. Ranks must agree on the skip before the host framework's next
///   collective.
///
/// Training forwards, evaluation forwards (gradients disabled) and backwards have separate traces.
/// The trace of a training forward omits a reshard at its end, or several of units that are read.
/// The backward begins with these units, so freed buffers would only be sent again.
///
/// Several modules may read a unit's weights, and no hook tells which read is a use's last one. So
/// a traced pass notes the end of the use after each read, and crosses it later. Its trace has the
/// end where it was noted last. A replay crosses that end with the trigger after it.
///
/// If a program calls a model's submodules, a forward has no certain end. Then a trigger that does
/// not lie ahead but is in the trace starts the next forward.
///
/// Deterministic: the crossings depend only on the requests. Not thread-safe.
class Order {
 public:
  /// @param host  [units] true if the unit is a host unit; units beyond its end are none.
  explicit Order(std::vector<bool> host = {}) : host_(std::move(host)) {}

  /// Starts a forward, after end_pass().
  /// @param has_end  true if end_forward() will follow. Until then a trigger that was crossed
  ///                 already does not start the next forward.
  void begin_forward(bool training, bool has_end = false);
  void end_forward() { has_end_ = false; }
  bool has_end() const { return has_end_; }

  /// Starts a backward, after end_pass().
  void begin_backward();

  /// Returns the crossings for one trigger in the open pass; the trigger itself comes last.
  /// @throws InternalError if no pass is open.
  std::vector<Crossing> request(Trigger trigger);

  /// Notes that the use which `end` ends may be over, in place of an earlier note of it. In a
  /// replay it does nothing.
  void note_end(Trigger end);

  /// Notes an end anew that is noted already.
  void renew_note(Trigger end);

  /// Forgets the noted end of a unit's use, because the use goes on or is over.
  void forget_end(core::UnitIndex unit);

  /// Returns the noted ends of the open pass; the one that was noted first comes first.
  std::vector<Trigger> noted_ends() const;

  /// Returns the crossing of a noted end. The trace has it where it was noted.
  Crossing cross_noted(Trigger end);

  /// True if an evaluation forward that is traced may end before this request, because `trigger`
  /// came first in it and has come often. A program that calls submodules would otherwise trace all
  /// its batches as one forward, and the next evaluation would owe as many.
  bool repeats(Trigger trigger) const;

  /// If the trace of the open forward, which follows none, consists of equal parts that begin with
  /// its first trigger, one of them becomes the trace. Returns true then, or if the first trigger
  /// has come so often that the forward should end anyway.
  bool keep_period();

  /// Returns the triggers that request(trigger) would cross before it.
  std::vector<Trigger> owed_before(Trigger trigger) const;

  /// Ends the replay of the open pass right before `trigger`, or at its end if `trigger` does not
  /// lie ahead. Returns the crossings before it.
  std::vector<Crossing> deviate_before(Trigger trigger);

  /// Marks that no hook names a trigger of the open pass any more: later requests follow from the
  /// crossings.
  void begin_end();

  /// Returns the crossings that the open pass still owes its trace. The pass stays open.
  std::vector<Crossing> catch_up();

  /// Returns the part of catch_up() that lies before the next use of a host unit.
  std::vector<Crossing> catch_up_to_host_use();

  /// Ends the open pass. Returns the crossings that it still owed; none if no pass is open.
  std::vector<Crossing> end_pass();

  /// True if a training forward has come since the last backward and a backward's trace is known:
  /// other ranks may have run a backward.
  bool owes_backward() const;

  /// True if a training forward has come since the last backward.
  bool unanswered() const { return unanswered_; }

  /// Returns the open pass, if any.
  std::optional<Pass> current() const { return current_; }

  /// True if the open pass is a forward for which end_pass() would return crossings.
  bool owes_forward() const;

  /// True if the open pass will still cross `trigger` without a request.
  bool owes(Trigger trigger) const;

  /// True if the open pass will cross `trigger` next.
  bool is_next(Trigger trigger) const;

  /// Returns the trace of a pass; empty if the pass follows none.
  const Trace& trace(Pass pass) const;

  /// True if the open pass follows no trace, so that ranks compare triggers.
  bool on_demand() const;

  /// True if the open pass follows a trace in which a use of a host unit lies ahead.
  bool owes_host_use() const;

  /// Returns the number of triggers of its trace that the open pass has crossed; -1 without a
  /// trace.
  int position() const;

 private:
  static constexpr std::size_t kNoTail = static_cast<std::size_t>(-1);
  // More than a forward uses its first module, as a rule.
  static constexpr int kFewestRepeats = 8;
  static constexpr int kMostRepeats = 64;

  struct Note {
    Trigger end;
    std::size_t place = 0;  // in the trace
  };

  struct Course {
    Trace triggers;
    std::vector<Note> notes;
    bool known = false;  // a whole pass has been traced
    bool deviated = false;
    std::size_t cursor = 0;
    std::size_t tail = kNoTail;  // index of the trigger at which the pass's end began

    void begin();
    bool replaying() const { return known && !deviated; }
    std::size_t find(Trigger trigger) const;
    std::vector<Crossing> advance(Trigger trigger, Pass pass);
    std::vector<Crossing> take(std::size_t end, Pass pass);
    bool lies_ahead(Trigger trigger) const;
    bool contains(Trigger trigger) const;
  };

  Course& course() { return courses_[static_cast<int>(*current_)]; }
  const Course& course() const { return courses_[static_cast<int>(*current_)]; }
  bool replaying() const;
  void begin(Pass pass);
  bool starts_forward(Trigger trigger) const;

  std::size_t next_host_use() const;
  bool is_read(const Trigger& trigger) const;
  void keep_last_units();

  std::vector<bool> host_;
  std::set<core::UnitIndex> read_;  // units whose end was ever noted
  Course courses_[3];               // [passes]
  std::optional<Pass> current_;
  bool has_end_ = false;     // see begin_forward()
  bool unanswered_ = false;  // true after a training forward until the next backward
};

}  // namespace dmuon::schedule
