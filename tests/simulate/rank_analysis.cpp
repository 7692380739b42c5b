#include "tests/simulate/rank_analysis.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "dmuon/core/error.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;
using schedule::Operation;

std::size_t lane_index(Kind kind) { return static_cast<std::size_t>(schedule::lane_of(kind)); }

void join(Frontier* into, const Frontier& other) {
  for (std::size_t lane = 0; lane < schedule::kNumLanes; ++lane)
    (*into)[lane] = std::max((*into)[lane], other[lane]);
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
  Frontier readers{-1, -1, -1};
};

struct UnitUse {
  Uses uses[kNumBuffers];
  std::array<int, schedule::kNumKinds> newest{};  // issue of each kind
  bool has_part = false;                          // stage 1 has come, or is on its way
  bool filled = false;                            // stage 2 likewise
  bool holds_gradients = false;
  bool routing = false;  // stage 1 has come, or is on its way, and was not finished
  bool sending = false;  // stage 2 likewise
  bool has_node_sum = false;
  int part_version = -1;  // of the node copy, or of this column's part of the packed weights
  int last_finish_intra = -1;
  int last_finish_inter = -1;

  UnitUse() { newest.fill(-1); }
};

class Analyzer {
 public:
  Analyzer(const Program& program, core::Slot slot, bool node_copy,
           std::vector<std::string>* violations)
      : program_(program),
        layout_(*program.layout),
        slot_(slot),
        has_inter_(layout_.has_inter()),
        node_copy_(node_copy),
        violations_(violations),
        units_(layout_.units.size()) {}

  RankAnalysis run() {
    waits_on_ = waits_on(program_);
    analysis_.after = waits_on_;
    for (now_ = 0; now_ < program_.num_issues(); ++now_) take(program_.issue(now_));
    for (const core::UnitIndex unit : units_.indices()) {
      if (units_[unit].routing || units_[unit].sending)
        violations_->push_back(
            core::message("slot ", slot_, ": the route of unit ", unit, " is never finished"));
    }
    return std::move(analysis_);
  }

 private:
  UnitUse& unit() { return units_.at(program_.issue(now_).operation.unit); }

  template <typename... Parts>
  void report(Parts&&... parts) {
    violations_->push_back(core::message("slot ", slot_, ", issue ", now_, ", ",
                                         describe(program_.issue(now_).operation), ": ", parts...));
  }

  void take(const Issue& taken) {
    const Operation& operation = taken.operation;
    order(operation);
    perform(taken);
    if (operation.kind != Kind::kUpdate)
      unit().newest[static_cast<std::size_t>(operation.kind)] = now_;
  }

  void order(const Operation& operation) {
    const auto here = static_cast<std::size_t>(now_);
    for (const int earlier : waits_on_[here]) {
      if (earlier >= 0)
        join(&analysis_.after[here], analysis_.after[static_cast<std::size_t>(earlier)]);
    }
    for (const schedule::Dependency& dependency : operation.after) {
      const UnitUse& other = units_.at(dependency.unit);
      const int earlier = other.newest[static_cast<std::size_t>(dependency.kind)];
      const int finished = dependency.kind == Kind::kRouteIntra   ? other.last_finish_intra
                           : dependency.kind == Kind::kRouteInter ? other.last_finish_inter
                                                                  : -1;
      const Operation named{.kind = dependency.kind, .unit = dependency.unit};
      if (earlier < 0 && operation.kind != Kind::kReshard)
        report("waits for ", describe(named), ", which was never issued");
      if (earlier >= 0 && earlier < finished)
        report("waits for ", describe(named), " of an earlier backward");
    }
  }

  void require_ordered(int earlier, Buffer buffer) {
    if (analysis_.is_ordered(program_, earlier, now_)) return;
    report("may run at the same time as issue ", earlier, ", ",
           describe(program_.issue(earlier).operation), ", which uses ",
           kBufferNames[static_cast<std::size_t>(buffer)], " too");
  }

  void read(UnitUse* of, Buffer buffer) {
    Uses& uses = of->uses[static_cast<std::size_t>(buffer)];
    require_ordered(uses.writer, buffer);
    uses.readers[lane_index(program_.issue(now_).operation.kind)] = now_;
  }
  void read(Buffer buffer) { read(&unit(), buffer); }

  // Filling, changing and freeing are the same to others.
  void write(UnitUse* of, Buffer buffer) {
    Uses& uses = of->uses[static_cast<std::size_t>(buffer)];
    require_ordered(uses.writer, buffer);
    for (const int reader : uses.readers) require_ordered(reader, buffer);
    uses = {now_, {-1, -1, -1}};
  }
  void write(Buffer buffer) { write(&unit(), buffer); }

  void perform(const Issue& taken) {
    switch (taken.operation.kind) {
      case Kind::kUpdate:
        update(taken.operation.batch);
        break;
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
      case Kind::kForward:
        read_weights();
        break;
      case Kind::kBackward:
        read_weights();
        write(Buffer::kGradients);
        unit().holds_gradients = true;
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
    }
    count_bytes();
  }

  void update(core::BatchIndex batch) {
    for (const core::UnitIndex touched : program_.batches.at(batch)) {
      write(&units_.at(touched), Buffer::kMasters);
      write(&units_.at(touched), Buffer::kTotal);
    }
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

  std::int64_t column_elements(const schedule::UnitLayout& layout) const {
    std::int64_t elements = 0;
    for (const core::Replicate replicate : core::Indices<core::Replicate>(layout_.num_replicates))
      elements += layout.owner_elements[layout_.slot_at(replicate, layout_.shard_of(slot_))];
    return elements;
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
      if (state.sending) bytes += 2 * column_elements(layout) * layout.gradient_size;
    }
    analysis_.peak_bytes = std::max(analysis_.peak_bytes, bytes);
  }

  const Program& program_;
  const schedule::Layout& layout_;
  core::Slot slot_;
  bool has_inter_;
  bool node_copy_;
  std::vector<std::string>* violations_;
  core::Vector<core::UnitIndex, UnitUse> units_;
  RankAnalysis analysis_;
  std::vector<Frontier> waits_on_;
  int now_ = 0;
};

}  // namespace

bool RankAnalysis::is_ordered(const Program& program, int first, int second) const {
  if (first < 0) return true;
  const Kind kind = program.issue(first).operation.kind;
  return after[static_cast<std::size_t>(second)][lane_index(kind)] >= first;
}

RankAnalysis analyze(const Program& program, core::Slot slot, bool node_copy,
                     std::vector<std::string>* violations) {
  return Analyzer(program, slot, node_copy, violations).run();
}

}  // namespace dmuon::simulate
