#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "dmuon/schedule/trigger.h"

namespace dmuon::schedule {

/// A trigger that the step crosses now.
struct Crossing {
  Trigger trigger;
  Pass pass;
  int position;  ///< in the pass's trace; -1 where none is followed
  /// Not known from a trace: every rank must confirm that it is at the same.
  bool compare() const { return position < 0; }
};

/// The one order in which a rank crosses the triggers of a step, and so issues their operations.
///
/// Collectives that two ranks issue in different order abort, hang or swap data silently, so hooks
/// never issue what they please. They say which trigger they are at; the order answers with what to
/// cross. The first pass of each kind is traced: each trigger is crossed as it comes, after
/// comparison with the other ranks. Later passes replay the trace: a trigger that lies ahead first
/// crosses everything before it, which is what a rank owes for units that it skipped. A trigger
/// that does not lie ahead is a deviation: the rest of the pass is served on demand, with
/// comparison, and the next pass of that kind is traced again. Passes are traced separately for
/// training forwards, evaluation forwards (gradients disabled) and backwards.
///
/// A training forward's trace leaves out a reshard that ends it: the backward begins with that
/// unit, so freeing it would only have it sent again.
///
/// Where a model is driven through its submodules, a forward has no certain end: a trigger that
/// does not lie ahead but is in the trace then starts the next forward.
///
/// Deterministic: the crossings depend only on the requests. Not thread-safe.
///
/// A replay that would skip a use of a host unit (UnitLayout::host), or the end of its backward, is
/// a deviation too, right before it: whether all ranks skip it must be known before the host
/// framework's next collective.
class Order {
 public:
  /// @param host  [units] whether the unit is one; those beyond its end are not.
  explicit Order(std::vector<bool> host = {}) : host_(std::move(host)) {}

  /// Starts a forward; returns what the pass before it still owed.
  std::vector<Crossing> begin_forward(bool training);

  /// Starts a backward; returns what the pass before it still owed.
  std::vector<Crossing> begin_backward();

  /// What to cross for one trigger in the open pass; the trigger itself comes last.
  /// @param has_end  whether the pass, if a forward, ends by end_pass() alone; else what was
  ///                 crossed in it ends it too.
  /// @throws InternalError if no pass is open.
  std::vector<Crossing> request(Trigger trigger, bool has_end = false);

  /// No hook says more in the open pass: what is requested now follows from what was crossed.
  void begin_end();

  /// What the open pass still owes where it follows a trace; the pass stays open.
  std::vector<Crossing> catch_up();

  /// The part of catch_up() that lies before the next use of a host unit.
  std::vector<Crossing> catch_up_to_host_use();

  /// Ends the current pass; returns what it still owed. Nothing where no pass is open.
  std::vector<Crossing> end_pass();

  /// Whether a training forward has come since the last backward, and a backward's trace is known:
  /// other ranks may have run one.
  bool owes_backward() const;

  /// Whether a training forward has come since the last backward.
  bool unanswered() const { return unanswered_; }

  /// The pass that is open, if any.
  std::optional<Pass> current() const { return current_; }

  /// Whether the open pass is a forward that end_pass() would cross more of.
  bool owes_forward() const;

  /// Whether the open pass will still cross `trigger` without its being requested.
  bool owes(Trigger trigger) const;

  /// Whether `trigger` is the next that the open pass will cross.
  bool is_next(Trigger trigger) const;

  /// The trace of a pass; empty where none is followed.
  const Trace& trace(Pass pass) const;

  /// Whether the open pass follows no trace, so that triggers are compared.
  bool on_demand() const;

  /// Whether the open pass follows a trace with a use of a host unit that has not come.
  bool owes_host_use() const;

  /// How much of its trace the open pass has crossed; -1 where it follows none.
  int position() const;

 private:
  static constexpr std::size_t kNoTail = static_cast<std::size_t>(-1);

  struct Course {
    Trace triggers;
    bool known = false;  // a whole pass has been traced
    bool deviated = false;
    std::size_t cursor = 0;
    std::size_t tail = kNoTail;  // of the triggers, where the pass's end began

    void begin();
    bool replaying() const { return known && !deviated; }
    std::size_t find(Trigger trigger) const;
    std::vector<Crossing> advance(Trigger trigger, Pass pass);
    std::vector<Crossing> take(std::size_t end, Pass pass);
    bool lies_ahead(Trigger trigger) const;
    bool contains(Trigger trigger) const;
    std::vector<Crossing> take_rest(Pass pass);
    void finish();
    void keep_last_unit();
  };

  Course& course() { return courses_[static_cast<int>(*current_)]; }
  const Course& course() const { return courses_[static_cast<int>(*current_)]; }
  std::vector<Crossing> begin(Pass pass);

  std::size_t next_host_use() const;

  std::vector<bool> host_;
  Course courses_[3];  // [passes]
  std::optional<Pass> current_;
  bool unanswered_ = false;  // a training forward without a backward since
};

}  // namespace dmuon::schedule
