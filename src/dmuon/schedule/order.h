#pragma once

#include <optional>
#include <vector>

namespace dmuon::schedule {

/// What the engine does to a unit.
enum class Action : int {
  kUnshard,  ///< fill the packed buffer with weights (communicates)
  kReshard,  ///< free it after a forward
  kRelease,  ///< a backward use is over: free it, and route gradients if `last`
};

struct Operation {
  Action action;
  int unit;
  bool operator==(const Operation&) const = default;
};

enum class Pass : int { kTrainForward, kEvalForward, kBackward };

/// An operation to issue now.
struct Issue {
  Operation operation;
  /// Not yet known from a trace: every rank must confirm that it issues the same.
  bool compare;
  /// No later operation of this pass releases the unit, so its gradients are complete.
  bool last;
};

/// The one order in which a rank issues its operations.
///
/// Collectives that two ranks issue in different order abort, hang or swap data silently, so hooks
/// never issue what they please. They request an operation; the order answers with what to issue.
/// The first pass of each kind is traced: each request is issued as it comes, after comparison with
/// the other ranks. Later passes replay the trace: a request that lies ahead first issues
/// everything before it, which is what a rank owes for units that it skipped. A request that does
/// not lie ahead is a deviation: the rest of the pass is served on demand, with comparison, and the
/// next pass of that kind is traced again. Passes are traced separately for training forwards,
/// evaluation forwards (gradients disabled) and backwards.
///
/// A training forward's trace leaves out a reshard that ends it: the backward begins with that
/// unit, so freeing it would only have it sent again.
///
/// A forward has no certain end (a model may be driven through its submodules), so a request that
/// does not lie ahead but is in the trace starts the next forward.
///
/// Deterministic: the issued sequence depends only on the requests. Not thread-safe.
class Order {
 public:
  /// Starts a forward; returns what the pass before it still owed.
  std::vector<Issue> begin_forward(bool training);

  /// Starts a backward; returns what the pass before it still owed.
  std::vector<Issue> begin_backward();

  /// Issues for one request in the open pass; the request itself comes last.
  /// @throws InternalError if no pass is open.
  std::vector<Issue> request(Operation operation);

  /// Ends the current pass; returns what it still owed. Nothing where no pass is open.
  std::vector<Issue> end_pass();

  /// Whether a training forward has come since the last backward, and a backward's trace is known:
  /// other ranks may have run one.
  bool owes_backward() const;

  /// The pass that is open, if any.
  std::optional<Pass> current() const { return current_; }

  /// Whether the open pass will still issue `operation` without its being requested.
  bool owes(Operation operation) const;

  /// Whether the open pass follows no trace, so that operations are compared.
  bool on_demand() const;

 private:
  struct Trace {
    std::vector<Operation> operations;
    std::vector<bool> last;  // [operations]
    bool known = false;      // a whole pass has been traced
    bool deviated = false;
    std::size_t cursor = 0;

    void begin();
    bool replaying() const { return known && !deviated; }
    std::vector<Issue> advance(Operation operation);
    std::vector<Issue> take(std::size_t end);
    bool lies_ahead(Operation operation) const;
    bool contains(Operation operation) const;
    std::vector<Issue> finish();
    void keep_last_unit();
  };

  Trace& trace() { return traces_[static_cast<int>(*current_)]; }
  std::vector<Issue> begin(Pass pass);

  Trace traces_[3];
  std::optional<Pass> current_;
  bool unanswered_ = false;  // a training forward without a backward since
};

}  // namespace dmuon::schedule
