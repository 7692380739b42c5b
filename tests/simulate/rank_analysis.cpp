#include "tests/simulate/rank_analysis.h"

#include <algorithm>
#include <numeric>

#include "dmuon/core/error.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;
using schedule::Operation;

void join(Frontier* into, const Frontier& other) {
  for (std::size_t lane = 0; lane < schedule::kNumLanes; ++lane)
    into->values[lane] = std::max(into->values[lane], other.values[lane]);
}

/// What several operations of a rank use, of one unit.
enum class Buffer : int {
  kMasters,    // the owner's weights
  kNodeCopy,   // the column member's
  kWeights,    // packed
  kGradients,  // packed
  kInbox,      // what comes from others in stage 1 of a route
  kNodeSum,    // the column member's sum of a node's gradients
  kNodeInbox,  // what comes from others in stage 2
  kTotal,      // the owner's accumulated gradient
};
constexpr std::size_t kNumBuffers = 8;
constexpr const char* kBufferNames[kNumBuffers] = {
    "the masters",       "the node copy",  "the packed weights", "the packed gradients",
    "the route's inbox", "the node's sum", "the node's inbox",   "the accumulated gradient"};

/// Who used a buffer since it was last changed, and who changed it.
struct Uses {
  int writer = -1;
  Frontier readers = kNothing;
};

struct UnitUse {
  Uses uses[kNumBuffers];
  bool has_part = false;  // stage 1 has come, or is on its way
  bool filled = false;    // stage 2 likewise
  bool holds_gradients = false;
  bool routing = false;  // stage 1 has come, or is on its way, and was not finished
  bool sending = false;  // stage 2 likewise
  bool has_node_sum = false;
  int part_version = -1;  // of the node copy, or of this column's part of the packed weights
  int last_finish_intra = -1;
  int last_finish_inter = -1;
};

class Analyzer {
 public:
  Analyzer(const Program& program, core::Owner rank, bool node_copy,
           std::vector<std::string>* violations)
      : program_(program),
        layout_(*program.layout),
        rank_(rank),
        has_inter_(layout_.has_inter()),
        node_copy_(node_copy),
        violations_(violations),
        units_(layout_.units.size()),
        newest_(program),
        next_(program.batches.size(), Kind::kPrepare),
        moving_(program.batches.size(), -1) {}

  RankAnalysis run() {
    waits_on_ = waits_on(program_);
    analysis_.after = waits_on_;
    for (now_ = 0; now_ < program_.num_issues(); ++now_) take(program_.issue(now_));
    for (const core::UnitIndex unit : units_.indices()) {
      if (units_[unit].routing || units_[unit].sending)
        violations_->push_back(
            core::message("rank ", rank_, ": the route of unit ", unit, " is never finished"));
    }
    for (const core::BatchIndex batch : next_.indices()) {
      if (next_[batch] != Kind::kPrepare)
        violations_->push_back(
            core::message("rank ", rank_, ": the update of batch ", batch, " is never finished"));
    }
    return std::move(analysis_);
  }

 private:
  UnitUse& unit() { return units_.at(program_.issue(now_).unit()); }

  template <typename... Parts>
  void report(Parts&&... parts) {
    violations_->push_back(core::message("rank ", rank_, ", issue ", now_, ", ",
                                         describe(program_.issue(now_)), ": ", parts...));
  }

  void take(const Issue& taken) {
    order(taken);
    if (taken.is_on_batch()) {
      update(taken.operation);
    } else {
      perform(taken);
    }
    if (!taken.compute) newest_.set(taken.operation, now_);
  }

  void order(const Issue& taken) {
    const auto here = static_cast<std::size_t>(now_);
    for (const int earlier : waits_on_[here]) {
      if (earlier >= 0)
        join(&analysis_.after[here], analysis_.after[static_cast<std::size_t>(earlier)]);
    }
    for (const schedule::Dependency& dependency : taken.operation.after) {
      const int earlier = newest_.of(dependency);
      const std::string named = schedule::describe(dependency.kind, dependency.subject);
      // There may be nothing to free, and weights may not have been updated yet.
      const bool optional = taken.is(Kind::kReshard) || dependency.kind == Kind::kApply;
      if (earlier < 0 && !(optional && !taken.is_on_batch()))
        report("waits for ", named, ", which was never issued");
      if (earlier >= 0 && earlier < last_finish(dependency))
        report("waits for ", named, " of an earlier backward");
    }
  }

  int last_finish(const schedule::Dependency& route) const {
    const auto* unit = std::get_if<core::UnitIndex>(&route.subject);
    if (route.kind == Kind::kRouteIntra) return units_.at(*unit).last_finish_intra;
    return route.kind == Kind::kRouteInter ? units_.at(*unit).last_finish_inter : -1;
  }

  void require_ordered(int earlier, Buffer buffer) {
    require_ordered(earlier, kBufferNames[static_cast<std::size_t>(buffer)]);
  }
  void require_ordered(int earlier, const char* buffer) {
    if (analysis_.is_ordered(program_, earlier, now_)) return;
    report("may run at the same time as issue ", earlier, ", ", describe(program_.issue(earlier)),
           ", which uses ", buffer, " too");
  }

  void read(UnitUse* of, Buffer buffer) {
    Uses& uses = of->uses[static_cast<std::size_t>(buffer)];
    require_ordered(uses.writer, buffer);
    uses.readers[program_.issue(now_).lane()] = now_;
  }
  void read(Buffer buffer) { read(&unit(), buffer); }

  // Filling, changing and freeing are the same to others.
  void write(UnitUse* of, Buffer buffer) {
    Uses& uses = of->uses[static_cast<std::size_t>(buffer)];
    require_ordered(uses.writer, buffer);
    for (const int reader : uses.readers) require_ordered(reader, buffer);
    uses = {now_, kNothing};
  }
  void write(Buffer buffer) { write(&unit(), buffer); }

  void compute(Compute what) {
    read_weights();
    if (what == Compute::kForward) return;
    write(Buffer::kGradients);
    unit().holds_gradients = true;
  }

  void perform(const Issue& taken) {
    if (taken.compute) {
      compute(*taken.compute);
      return count_bytes();
    }
    switch (taken.operation.kind) {
      case Kind::kPublishInter:
        if (unit().has_part && unit().part_version == taken.version()) report("sends it twice");
        read(Buffer::kMasters);
        write(node_copy_ ? Buffer::kNodeCopy : Buffer::kWeights);
        unit().has_part = true;
        unit().part_version = taken.version();
        break;
      case Kind::kPublishIntra:
        publish_intra(taken.version());
        break;
      case Kind::kAwaitWeights:
        unit().holds_gradients |=
            taken.crossing && taken.crossing->pass == schedule::Pass::kBackward;
        read_weights();
        break;
      case Kind::kReshard:
        write(Buffer::kWeights);
        unit().filled = false;
        if (!node_copy_) unit().has_part = false;
        break;
      case Kind::kRouteIntra:
      case Kind::kFinishRouteIntra:
        route_intra(taken.operation.kind);
        break;
      case Kind::kRouteInter:
      case Kind::kFinishRouteInter:
        route_inter(taken.operation.kind);
        break;
      case Kind::kPrepare:
      case Kind::kGather:
      case Kind::kOrthogonalise:
      case Kind::kScatter:
      case Kind::kApply:
      case Kind::kFinishUpdate:
        core::bug("an operation on a batch");
    }
    count_bytes();
  }

  // Its operations follow each other, each with what the last one left. Then compute waits for
  // them.
  void update(const Operation& operation) {
    const core::BatchIndex batch = operation.batch();
    if (operation.kind != next_.at(batch)) report("comes out of turn");
    next_[batch] = after(operation.kind);
    require_ordered(moving_[batch], "what the batch moves");
    moving_[batch] = now_;
    for (const core::UnitIndex touched : program_.batches[batch]) {
      if (operation.kind == Kind::kPrepare) read(&units_.at(touched), Buffer::kTotal);
      if (operation.kind == Kind::kApply) write(&units_.at(touched), Buffer::kMasters);
    }
  }

  Kind after(Kind kind) const {
    if (kind == Kind::kFinishUpdate) return Kind::kPrepare;
    const Kind next = static_cast<Kind>(static_cast<int>(kind) + 1);
    const bool exchanges = next == Kind::kGather || next == Kind::kScatter;
    return exchanges && layout_.tensor_parallel == 1 ? after(next) : next;
  }

  void publish_intra(int version) {
    if (unit().filled) report("fills packed weights that are full");
    if (!has_inter_) {
      read(Buffer::kMasters);
    } else if (!unit().has_part) {
      report("reads what stage 1 did not fill");
    } else {
      if (unit().part_version != version)
        report("would publish version ", unit().part_version, " as version ", version);
      if (node_copy_) read(Buffer::kNodeCopy);
    }
    write(Buffer::kWeights);
    unit().filled = true;
  }

  void read_weights() {
    if (!unit().filled) report("reads packed weights that are free");
    read(Buffer::kWeights);
  }

  void route_intra(Kind kind) {
    UnitUse& state = unit();
    if (kind == Kind::kRouteIntra) {
      if (state.routing || state.sending) report("routes again what is being routed");
      state.holds_gradients = state.routing = state.has_node_sum = true;
      read(Buffer::kGradients);
      write(Buffer::kInbox);
      write(has_inter_ ? Buffer::kNodeSum : Buffer::kTotal);
      return;
    }
    if (!state.routing) report("the unit's gradients are not being routed");
    write(Buffer::kGradients);
    write(Buffer::kInbox);
    state.holds_gradients = state.routing = false;
    state.last_finish_intra = now_;
  }

  void route_inter(Kind kind) {
    UnitUse& state = unit();
    if (kind == Kind::kRouteInter) {
      if (!state.has_node_sum) report("the unit has no sum to send, or has sent it already");
      state.has_node_sum = false;
      state.sending = true;
      write(Buffer::kNodeSum);
      write(Buffer::kNodeInbox);
      write(Buffer::kTotal);
      return;
    }
    if (!state.sending) report("the node's sum is not being sent");
    write(Buffer::kNodeSum);
    write(Buffer::kNodeInbox);
    state.sending = false;
    state.last_finish_inter = now_;
  }

  // What this rank has of all columns' parts.
  std::int64_t buffer_elements(const schedule::UnitLayout& unit) const {
    const std::int64_t others = (layout_.num_shards - 1) * unit.kept_elements;
    return std::reduce(unit.owner_elements.begin(), unit.owner_elements.end(), -others);
  }

  // In the order of issue, which is when memory is taken.
  void count_bytes() {
    std::int64_t bytes = 0;
    for (const core::UnitIndex i : units_.indices()) {
      const UnitUse& state = units_[i];
      const schedule::UnitLayout& layout = layout_.units[i];
      const std::int64_t elements = buffer_elements(layout);
      if (state.filled || (!node_copy_ && state.has_part)) bytes += elements * layout.weight_size;
      const int buffers = (state.holds_gradients ? 1 : 0) + (state.routing ? 1 : 0);
      bytes += buffers * elements * layout.gradient_size;
      // A sum that is held is a partial sum, in a buffer of its own.
      if (state.sending)
        bytes +=
            2 * layout_.column_elements(layout, layout_.shard_of(rank_)) * layout.gradient_size;
    }
    analysis_.peak_bytes = std::max(analysis_.peak_bytes, bytes);
  }

  const Program& program_;
  const schedule::Layout& layout_;
  core::Owner rank_;
  bool has_inter_;
  bool node_copy_;
  std::vector<std::string>* violations_;
  core::Vector<core::UnitIndex, UnitUse> units_;
  Newest newest_;
  core::Vector<core::BatchIndex, Kind> next_;   // operation of each batch
  core::Vector<core::BatchIndex, int> moving_;  // the last operation on each batch
  RankAnalysis analysis_;
  std::vector<Frontier> waits_on_;
  int now_ = 0;
};

}  // namespace

bool RankAnalysis::is_ordered(const Program& program, int first, int second) const {
  if (first < 0) return true;
  return after[static_cast<std::size_t>(second)][program.issue(first).lane()] >= first;
}

RankAnalysis analyze(const Program& program, core::Owner rank, bool node_copy,
                     std::vector<std::string>* violations) {
  return Analyzer(program, rank, node_copy, violations).run();
}

}  // namespace dmuon::simulate
