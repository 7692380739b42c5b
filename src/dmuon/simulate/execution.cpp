#include "dmuon/simulate/execution.h"

#include <algorithm>
#include <deque>

#include "dmuon/core/error.h"

namespace dmuon::simulate {
namespace {

using core::Slot;
using layout::Axis;
using schedule::Kind;
using schedule::Lane;
using schedule::Message;

constexpr double kNotYet = -1;
constexpr core::EachOf<Lane, schedule::kNumLanes> kLanes;

/// A collective of a group: what its first member said it is, and who has begun it.
struct Collective {
  Kind kind;
  core::UnitIndex unit;
  Message message;
  std::vector<double> begun_us;  // [members]
  int num_begun = 0;
  double last_begun_us = 0;
};

struct LaneState {
  std::vector<int> issues;  // that the lane will run
  std::size_t cursor = 0;   // the first that is not done
  bool running = false;     // the one at the cursor
  double now_us = 0;        // of what has been done
  double start_us = 0;      // of the one at the cursor
  std::vector<Message> messages;
  std::size_t message = 0;   // the first of these that is not done
  bool begun = false;        // that message
  std::size_t sequence = 0;  // its place among the group's
};

struct RankState {
  schedule::PerLane<LaneState> lanes;
  std::vector<Frontier> waits_on;         // [issues]
  std::vector<double> issued_us, end_us;  // [issues]
  int num_issued = 0;
  int blocked_on = -1;  // the issue on the compute lane that is not done
  double now_us = 0;
  bool queued = false;
};

class Machine {
 public:
  Machine(const Programs& programs, const Timing& timing, Witness* witness)
      : programs_(programs),
        timing_(timing),
        witness_(witness),
        mesh_(*programs.front().layout),
        ranks_(programs.size()),
        groups_(static_cast<std::size_t>(mesh_.num_shards + mesh_.num_replicates)) {
    run_.timeline.resize(programs.size());
    for (const Slot slot : programs.indices()) {
      RankState& own = ranks_[slot];
      own.waits_on = waits_on(programs[slot]);
      own.issued_us.assign(programs[slot].issues.size(), kNotYet);
      own.end_us.assign(programs[slot].issues.size(), kNotYet);
      for (int i = 0; i < programs[slot].num_issues(); ++i) {
        own.lanes[issue(slot, i).lane()].issues.push_back(i);
      }
      wake(slot);
    }
  }

  Execution run() {
    while (!awake_.empty()) {
      const Slot slot = awake_.front();
      awake_.pop_front();
      rank(slot).queued = false;
      bool progress = true;
      while (progress) {
        progress = issue_all(slot);
        for (const Lane lane : kLanes) progress |= advance(slot, lane);
      }
    }
    report_blocked();
    report_unmatched();
    return std::move(run_);
  }

 private:
  RankState& rank(Slot slot) { return ranks_[slot]; }
  const Issue& issue(Slot slot, int index) const { return programs_[slot].issue(index); }

  double compute_us(const Issue& of) {
    return of.compute || of.lane() == Lane::kUpdate ? timing_.compute_us(of) : 0;
  }

  void wake(Slot slot) {
    if (rank(slot).queued) return;
    rank(slot).queued = true;
    awake_.push_back(slot);
  }

  // Up to the next operation that blocks the program.
  bool issue_all(Slot slot) {
    RankState& own = rank(slot);
    const int before = own.num_issued;
    while (own.blocked_on < 0 && own.num_issued < programs_[slot].num_issues()) {
      const int index = own.num_issued++;
      own.issued_us[static_cast<std::size_t>(index)] = own.now_us;
      if (issue(slot, index).lane() == Lane::kCompute) own.blocked_on = index;
    }
    return own.num_issued > before;
  }

  bool advance(Slot slot, Lane of) {
    LaneState& lane = rank(slot).lanes[of];
    bool progress = false;
    while (lane.cursor < lane.issues.size() && lane.issues[lane.cursor] < rank(slot).num_issued) {
      const int index = lane.issues[lane.cursor];
      if (!lane.running && !start(slot, &lane, index)) break;
      while (lane.message < lane.messages.size() && pass_message(slot, &lane, index)) {
        progress = true;
      }
      if (lane.message < lane.messages.size()) break;
      finish(slot, of, index);
      progress = true;
    }
    return progress;
  }

  bool start(Slot slot, LaneState* lane, int index) {
    const RankState& own = rank(slot);
    double start_us = std::max(lane->now_us, own.issued_us[static_cast<std::size_t>(index)]);
    for (const int earlier : own.waits_on[static_cast<std::size_t>(index)]) {
      if (earlier < 0) continue;
      const double end_us = own.end_us[static_cast<std::size_t>(earlier)];
      if (end_us == kNotYet) return false;
      start_us = std::max(start_us, end_us);
    }
    lane->running = true;
    lane->start_us = lane->now_us = start_us;
    lane->messages = messages_of(slot, index);
    lane->message = 0;
    if (witness_ != nullptr) witness_->start(slot, index);
    return true;
  }

  std::vector<Message> messages_of(Slot slot, int index) const {
    const Issue& of = issue(slot, index);
    if (!of.carries_messages()) return {};
    return schedule::messages_of(of.operation, *programs_[slot].layout, slot);
  }

  void finish(Slot slot, Lane of, int index) {
    RankState& own = rank(slot);
    LaneState& lane = own.lanes[of];
    if (witness_ != nullptr) witness_->finish(slot, index);
    lane.now_us += compute_us(issue(slot, index));
    if (of == Lane::kCompute) {
      own.now_us = lane.now_us;
      own.blocked_on = -1;
    }
    const auto at = static_cast<std::size_t>(index);
    own.end_us[at] = lane.now_us;
    run_.timeline[slot].push_back({index, of, own.issued_us[at], lane.start_us, lane.now_us});
    lane.running = false;
    ++lane.cursor;
  }

  // Rows come first, then columns.
  std::size_t group_of(Slot slot, Axis axis) const {
    if (axis == Axis::kRow) return mesh_.replicate_of(slot).position();
    return static_cast<std::size_t>(mesh_.num_replicates) + mesh_.shard_of(slot).position();
  }

  bool pass_message(Slot slot, LaneState* lane, int index) {
    const Message& message = lane->messages[lane->message];
    const std::size_t group = group_of(slot, message.axis);
    if (!lane->begun) begin_message(slot, lane, index, group);
    const Collective& collective = groups_[group][lane->sequence];
    const int member = mesh_.member_of(slot, message.axis);
    double ready_us = lane->now_us;
    const bool is_root = member == message.root;
    if (timing_.rendezvous || (!schedule::is_publication(collective.kind) && is_root)) {
      if (collective.num_begun < static_cast<int>(collective.begun_us.size())) return false;
      ready_us = std::max(ready_us, collective.last_begun_us);
    } else if (schedule::is_publication(collective.kind) && !is_root) {
      const double root_us = collective.begun_us.at(static_cast<std::size_t>(message.root));
      if (root_us == kNotYet) return false;
      ready_us = std::max(ready_us, root_us);
    }
    lane->now_us = ready_us + timing_.message_us(message);
    if (witness_ != nullptr && (schedule::is_publication(collective.kind) || is_root))
      witness_->receive(slot, index, {group, lane->sequence});
    lane->begun = false;
    ++lane->message;
    ++lane->sequence;
    return true;
  }

  void begin_message(Slot slot, LaneState* lane, int index, std::size_t group) {
    const schedule::Operation& own = issue(slot, index).operation;
    const Message& message = lane->messages[lane->message];
    const int size = mesh_.size(message.axis);
    std::deque<Collective>& collectives = groups_[group];
    while (collectives.size() <= lane->sequence)
      collectives.push_back(
          {own.kind, own.unit(), message, std::vector(static_cast<std::size_t>(size), kNotYet)});
    Collective& collective = collectives[lane->sequence];
    if (collective.kind != own.kind || collective.unit != own.unit() ||
        !(collective.message == message)) {
      run_.violations.push_back(
          core::message("slot ", slot, ", issue ", index, ", ", describe(issue(slot, index)),
                        ": message ", lane->sequence, " of the group has root ", message.root,
                        " and ", message.bytes, " bytes, but another member's is of ",
                        schedule::describe(collective.kind, collective.unit), " with root ",
                        collective.message.root, " and ", collective.message.bytes, " bytes"));
    }
    const int member = mesh_.member_of(slot, message.axis);
    collective.begun_us.at(static_cast<std::size_t>(member)) = lane->now_us;
    collective.last_begun_us = std::max(collective.last_begun_us, lane->now_us);
    ++collective.num_begun;
    if (witness_ != nullptr && (!schedule::is_publication(own.kind) || member == message.root))
      witness_->contribute(slot, index, {group, lane->sequence});
    lane->begun = true;
    for (int other = 0; other < size; ++other) {
      if (other != member && collective.begun_us[static_cast<std::size_t>(other)] != kNotYet)
        wake(mesh_.slot_of(slot, message.axis, other));
    }
  }

  void report_blocked() {
    for (const Slot slot : ranks_.indices()) {
      for (const LaneState& lane : ranks_[slot].lanes) {
        if (lane.cursor == lane.issues.size()) continue;
        const int index = lane.issues[lane.cursor];
        if (index >= ranks_[slot].num_issued) continue;
        run_.violations.push_back(
            core::message("slot ", slot, ", issue ", index, ", ", describe(issue(slot, index)),
                          ": waits forever", lane.begun ? " for another member of a group" : ""));
      }
    }
  }

  void report_unmatched() {
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      for (const Collective& collective : groups_[group]) {
        if (collective.num_begun == static_cast<int>(collective.begun_us.size())) continue;
        run_.violations.push_back(core::message(
            "group ", group, ": ", collective.num_begun, " of ", collective.begun_us.size(),
            " members begin a message of ", schedule::describe(collective.kind, collective.unit)));
        return;
      }
    }
  }

  const Programs& programs_;
  const Timing& timing_;
  Witness* witness_;
  Execution run_;
  const schedule::Layout& mesh_;
  core::Vector<Slot, RankState> ranks_;
  std::vector<std::deque<Collective>> groups_;  // rows, then columns
  std::deque<Slot> awake_;
};

}  // namespace

Execution execute(const Programs& programs, const Timing& timing, Witness* witness) {
  core::require(!programs.empty() && programs.size() == programs.front().layout->num_slots(),
                "execute: programs: expected one a slot, got ", programs.size());
  return Machine(programs, timing, witness).run();
}

}  // namespace dmuon::simulate
