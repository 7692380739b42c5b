#include "dmuon/simulate/machine.h"

#include <algorithm>
#include <array>
#include <deque>
#include <random>

#include "dmuon/core/error.h"
#include "dmuon/simulate/data.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;
using schedule::Lane;
using schedule::Message;

constexpr std::size_t kCompute = static_cast<std::size_t>(Lane::kCompute);
constexpr double kNotYet = -1;

bool publishes(Kind kind) { return kind == Kind::kPublishInter || kind == Kind::kPublishIntra; }

/// A collective of a group: what its first member said it is, and who has begun it.
struct Collective {
  Kind kind;
  int unit;
  Message message;
  std::vector<double> begun_us;  // [members]
  int num_begun = 0;
  double last_begun_us = 0;
  Value value;
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

struct Rank {
  std::array<LaneState, kNumLanes> lanes;
  std::vector<double> issued_us, end_us;  // [issues]
  int num_issued = 0;
  int blocked_on = -1;  // the issue on the compute lane that is not done
  double now_us = 0;
  bool queued = false;
};

class Machine {
 public:
  Machine(const std::vector<Program>& programs, const std::vector<RankAnalysis>& analyses,
          bool node_copy, const Delays& delays, DryRun* run)
      : programs_(programs),
        analyses_(analyses),
        delays_(delays),
        run_(run),
        data_(programs, node_copy, &run->violations),
        shards_(programs.front().layout->num_shards),
        replicates_(programs.front().layout->num_replicates),
        ranks_(programs.size()),
        groups_(static_cast<std::size_t>(shards_ + replicates_)),
        random_(delays.seed) {
    run->timeline.resize(programs.size());
    for (std::size_t slot = 0; slot < programs.size(); ++slot) {
      Rank& rank = ranks_[slot];
      const std::size_t num_issues = programs[slot].issues.size();
      rank.issued_us.assign(num_issues, kNotYet);
      rank.end_us.assign(num_issues, kNotYet);
      for (std::size_t i = 0; i < num_issues; ++i) {
        const Lane lane = schedule::lane_of(programs[slot].issues[i].operation.kind);
        if (analyses[slot].active[i])
          rank.lanes[static_cast<std::size_t>(lane)].issues.push_back(static_cast<int>(i));
      }
      wake(static_cast<int>(slot));
    }
  }

  void run() {
    while (!awake_.empty()) {
      const int slot = awake_.front();
      awake_.pop_front();
      rank(slot).queued = false;
      bool progress = true;
      while (progress) {
        progress = issue_all(slot);
        for (std::size_t lane = 0; lane < kNumLanes; ++lane) progress |= advance(slot, lane);
      }
    }
    report_blocked();
    report_unmatched();
  }

 private:
  Rank& rank(int slot) { return ranks_[static_cast<std::size_t>(slot)]; }
  const schedule::Operation& operation(int slot, int index) const {
    return programs_[static_cast<std::size_t>(slot)]
        .issues[static_cast<std::size_t>(index)]
        .operation;
  }

  double draw(double mean_us) {
    return static_cast<double>(random_()) / static_cast<double>(std::minstd_rand::max()) * 2 *
           mean_us;
  }

  void wake(int slot) {
    if (rank(slot).queued) return;
    rank(slot).queued = true;
    awake_.push_back(slot);
  }

  // Up to the next operation that blocks the program.
  bool issue_all(int slot) {
    Rank& own = rank(slot);
    const int before = own.num_issued;
    const int num_issues = static_cast<int>(own.end_us.size());
    while (own.blocked_on < 0 && own.num_issued < num_issues) {
      const auto index = static_cast<std::size_t>(own.num_issued++);
      if (!analyses_[static_cast<std::size_t>(slot)].active[index]) continue;
      own.issued_us[index] = own.now_us;
      const Kind kind = operation(slot, static_cast<int>(index)).kind;
      if (schedule::lane_of(kind) == Lane::kCompute) own.blocked_on = static_cast<int>(index);
    }
    return own.num_issued > before;
  }

  bool advance(int slot, std::size_t lane_index) {
    LaneState& lane = rank(slot).lanes[lane_index];
    bool progress = false;
    while (lane.cursor < lane.issues.size() && lane.issues[lane.cursor] < rank(slot).num_issued) {
      const int index = lane.issues[lane.cursor];
      if (!lane.running && !start(slot, &lane, index)) break;
      while (lane.message < lane.messages.size() && pass_message(slot, &lane, index)) {
        progress = true;
      }
      if (lane.message < lane.messages.size()) break;
      finish(slot, lane_index, index);
      progress = true;
    }
    return progress;
  }

  bool start(int slot, LaneState* lane, int index) {
    const Rank& own = rank(slot);
    double start_us = std::max(lane->now_us, own.issued_us[static_cast<std::size_t>(index)]);
    const RankAnalysis& analysis = analyses_[static_cast<std::size_t>(slot)];
    for (const int earlier : analysis.waits_on[static_cast<std::size_t>(index)]) {
      if (earlier < 0) continue;
      const double end_us = own.end_us[static_cast<std::size_t>(earlier)];
      if (end_us == kNotYet) return false;
      start_us = std::max(start_us, end_us);
    }
    lane->running = true;
    lane->start_us = lane->now_us = start_us;
    lane->messages = schedule::messages_of(operation(slot, index),
                                           *programs_[static_cast<std::size_t>(slot)].layout, slot);
    lane->message = 0;
    data_.start(slot, index);
    return true;
  }

  void finish(int slot, std::size_t lane_index, int index) {
    Rank& own = rank(slot);
    LaneState& lane = own.lanes[lane_index];
    data_.finish(slot, index);
    if (lane_index == kCompute) {
      const Kind kind = operation(slot, index).kind;
      const bool computes =
          kind == Kind::kUpdate || kind == Kind::kForward || kind == Kind::kBackward;
      if (computes) lane.now_us += draw(delays_.compute_us);
      own.now_us = lane.now_us;
      own.blocked_on = -1;
    }
    const auto at = static_cast<std::size_t>(index);
    own.end_us[at] = lane.now_us;
    run_->timeline[static_cast<std::size_t>(slot)].push_back(
        {index, static_cast<Lane>(lane_index), own.issued_us[at], lane.start_us, lane.now_us});
    lane.running = false;
    ++lane.cursor;
  }

  int group_of(int slot, Message::Group group) const {
    return group == Message::Group::kRow ? slot / shards_ : replicates_ + slot % shards_;
  }
  int member_of(int slot, Message::Group group) const {
    return group == Message::Group::kRow ? slot % shards_ : slot / shards_;
  }
  int slot_of(int slot, Message::Group group, int member) const {
    return group == Message::Group::kRow ? slot / shards_ * shards_ + member
                                         : member * shards_ + slot % shards_;
  }

  bool pass_message(int slot, LaneState* lane, int index) {
    const Message& message = lane->messages[lane->message];
    auto& collectives = groups_[static_cast<std::size_t>(group_of(slot, message.group))];
    if (!lane->begun) begin_message(slot, lane, index, &collectives);
    const Collective& collective = collectives[lane->sequence];
    const int member = member_of(slot, message.group);
    double ready_us = lane->now_us;
    const bool is_root = member == message.root;
    if (delays_.rendezvous || (!publishes(collective.kind) && is_root)) {
      if (collective.num_begun < static_cast<int>(collective.begun_us.size())) return false;
      ready_us = std::max(ready_us, collective.last_begun_us);
    } else if (publishes(collective.kind) && !is_root) {
      const double root_us = collective.begun_us.at(static_cast<std::size_t>(message.root));
      if (root_us == kNotYet) return false;
      ready_us = std::max(ready_us, root_us);
    }
    lane->now_us = ready_us + draw(delays_.message_us);
    if (publishes(collective.kind) || is_root) data_.receive(slot, index, collective.value);
    lane->begun = false;
    ++lane->message;
    ++lane->sequence;
    return true;
  }

  void begin_message(int slot, LaneState* lane, int index, std::deque<Collective>* collectives) {
    const schedule::Operation& own = operation(slot, index);
    const Message& message = lane->messages[lane->message];
    const auto size =
        static_cast<std::size_t>(message.group == Message::Group::kRow ? shards_ : replicates_);
    while (collectives->size() <= lane->sequence)
      collectives->push_back({own.kind, own.unit, message, std::vector(size, kNotYet), 0, 0, {}});
    Collective& collective = (*collectives)[lane->sequence];
    if (collective.kind != own.kind || collective.unit != own.unit ||
        !(collective.message == message)) {
      run_->violations.push_back(
          core::message("slot ", slot, ", issue ", index, ", ", describe(own), ": message ",
                        lane->sequence, " of the group has root ", message.root, " and ",
                        message.bytes, " bytes, but another member's is of ",
                        describe({collective.kind, collective.unit, 0, {}}), " with root ",
                        collective.message.root, " and ", collective.message.bytes, " bytes"));
    }
    const int member = member_of(slot, message.group);
    collective.begun_us.at(static_cast<std::size_t>(member)) = lane->now_us;
    collective.last_begun_us = std::max(collective.last_begun_us, lane->now_us);
    ++collective.num_begun;
    if (!publishes(own.kind) || member == message.root)
      collective.value.merge(data_.contribution(slot, index));
    lane->begun = true;
    for (int other = 0; other < static_cast<int>(size); ++other) {
      if (other != member && collective.begun_us[static_cast<std::size_t>(other)] != kNotYet)
        wake(slot_of(slot, message.group, other));
    }
  }

  void report_blocked() {
    for (std::size_t slot = 0; slot < ranks_.size(); ++slot) {
      for (const LaneState& lane : ranks_[slot].lanes) {
        if (lane.cursor == lane.issues.size()) continue;
        const int index = lane.issues[lane.cursor];
        if (index >= ranks_[slot].num_issued) continue;
        run_->violations.push_back(
            core::message("slot ", slot, ", issue ", index, ", ",
                          describe(operation(static_cast<int>(slot), index)), ": waits forever",
                          lane.begun ? " for another member of a group" : ""));
      }
    }
  }

  void report_unmatched() {
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      for (const Collective& collective : groups_[group]) {
        if (collective.num_begun == static_cast<int>(collective.begun_us.size())) continue;
        run_->violations.push_back(core::message(
            "group ", group, ": ", collective.num_begun, " of ", collective.begun_us.size(),
            " members begin a message of ", describe({collective.kind, collective.unit, 0, {}})));
        return;
      }
    }
  }

  const std::vector<Program>& programs_;
  const std::vector<RankAnalysis>& analyses_;
  const Delays& delays_;
  DryRun* run_;
  Data data_;
  int shards_;
  int replicates_;
  std::vector<Rank> ranks_;
  std::vector<std::deque<Collective>> groups_;  // rows, then columns
  std::deque<int> awake_;
  std::minstd_rand random_;
};

}  // namespace

void execute(const std::vector<Program>& programs, const std::vector<RankAnalysis>& analyses,
             bool node_copy, const Delays& delays, DryRun* run) {
  Machine(programs, analyses, node_copy, delays, run).run();
}

}  // namespace dmuon::simulate
