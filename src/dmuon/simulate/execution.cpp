#include "dmuon/simulate/execution.h"

#include <algorithm>
#include <deque>

#include "dmuon/core/error.h"
#include "dmuon/simulate/collective.h"
#include "dmuon/simulate/membership.h"

namespace dmuon::simulate {
namespace {

using core::Owner;
using core::Slot;
using layout::Axis;
using schedule::Lane;
using schedule::Message;

constexpr core::EachOf<Lane, schedule::kNumLanes> kLanes;

struct LaneState {
  std::vector<int> issues;  // that the lane will run
  std::size_t cursor = 0;   // the first that is not done
  bool running = false;     // the one at the cursor
  double now_us = 0;        // of what has been done
  std::vector<Message> messages;
  std::size_t message = 0;   // the first of these that is not done
  bool begun = false;        // that message
  std::size_t sequence = 0;  // its place among the group's
};

struct RankState {
  schedule::PerLane<LaneState> lanes;
  std::vector<Frontier> waits_on;  // [issues]
  std::vector<double> issued_us;   // [issues]
  int num_issued = 0;
  int blocked_on = -1;  // the issue on the compute lane that is not done
  int computed = -1;    // the last one there that is
  double now_us = 0;
  bool queued = false;
};

class Machine {
 public:
  Machine(const Programs& programs, Durations& durations, Witness* witness)
      : programs_(programs),
        durations_(durations),
        rendezvous_(durations.rendezvous()),
        witness_(witness),
        mesh_(*programs.front().layout),
        ranks_(programs.size()),
        groups_(static_cast<std::size_t>(num_groups(mesh_))) {
    run_.timeline.resize(programs.size());
    run_.origins.resize(programs.size());
    for (const Owner rank : programs.indices()) {
      RankState& own = ranks_[rank];
      own.waits_on = waits_on(programs[rank]);
      own.issued_us.resize(programs[rank].issues.size());
      run_.origins[rank].resize(programs[rank].issues.size());
      for (int i = 0; i < programs[rank].num_issues(); ++i) {
        own.lanes[issue(rank, i).lane()].issues.push_back(i);
      }
      wake(rank);
    }
  }

  Execution run() {
    while (!awake_.empty()) {
      const Owner rank = awake_.front();
      awake_.pop_front();
      state(rank).queued = false;
      bool progress = true;
      while (progress) {
        progress = issue_all(rank);
        for (const Lane lane : kLanes) progress |= advance(rank, lane);
      }
    }
    report_blocked();
    report_unmatched();
    return std::move(run_);
  }

 private:
  RankState& state(Owner rank) { return ranks_[rank]; }
  const Issue& issue(Owner rank, int index) const { return programs_[rank].issue(index); }
  Origin& origin(Owner rank, int index) {
    return run_.origins[rank][static_cast<std::size_t>(index)];
  }

  // Returns the time that an operation takes beside its messages.
  double work_us(Owner rank, const Issue& of, bool has_messages) {
    const bool on_batch = of.lane() == Lane::kUpdate || of.lane() == Lane::kSlices;
    if (of.compute || on_batch) return durations_.work_us(rank, of);
    return of.carries_messages() && !has_messages ? durations_.idle_us(rank, of) : 0;
  }

  void wake(Owner rank) {
    if (state(rank).queued) return;
    state(rank).queued = true;
    awake_.push_back(rank);
  }

  // Up to the next operation that blocks the program.
  bool issue_all(Owner rank) {
    RankState& own = state(rank);
    const int before = own.num_issued;
    while (own.blocked_on < 0 && own.num_issued < programs_[rank].num_issues()) {
      const int index = own.num_issued++;
      own.issued_us[static_cast<std::size_t>(index)] = own.now_us;
      origin(rank, index).after = own.computed;
      if (issue(rank, index).lane() == Lane::kCompute) own.blocked_on = index;
    }
    return own.num_issued > before;
  }

  bool advance(Owner rank, Lane of) {
    LaneState& lane = state(rank).lanes[of];
    bool progress = false;
    while (lane.cursor < lane.issues.size() && lane.issues[lane.cursor] < state(rank).num_issued) {
      const int index = lane.issues[lane.cursor];
      if (!lane.running && !start(rank, &lane, index)) break;
      while (lane.message < lane.messages.size() && pass_message(rank, &lane, index)) {
        progress = true;
      }
      if (lane.message < lane.messages.size()) break;
      finish(rank, of, index);
      progress = true;
    }
    return progress;
  }

  bool start(Owner rank, LaneState* lane, int index) {
    const RankState& own = state(rank);
    int after = origin(rank, index).after;
    double start_us = own.issued_us[static_cast<std::size_t>(index)];
    const auto start_after = [&](int earlier, double end_us) {
      if (end_us <= start_us) return;
      start_us = end_us;
      after = earlier;
    };
    if (lane->cursor > 0) start_after(lane->issues[lane->cursor - 1], lane->now_us);
    for (const int earlier : own.waits_on[static_cast<std::size_t>(index)]) {
      if (earlier < 0) continue;
      const double end_us = origin(rank, earlier).end_us;
      if (end_us == Origin::kNotDone) return false;
      start_after(earlier, end_us);
    }
    lane->running = true;
    lane->now_us = start_us;
    origin(rank, index).after = after;
    origin(rank, index).start_us = start_us;
    lane->messages = messages_of(rank, index);
    lane->message = 0;
    if (witness_ != nullptr) witness_->start(rank, index);
    return true;
  }

  std::vector<Message> messages_of(Owner rank, int index) const {
    const Issue& of = issue(rank, index);
    if (of.lane() == Lane::kSlices && mesh_.tensor_parallel > 1) return {{Axis::kRow, 0, 0}};
    if (!of.carries_messages()) return {};
    return schedule::messages_of(of.operation, *programs_[rank].layout, mesh_.slot_of(rank));
  }

  void finish(Owner rank, Lane of, int index) {
    RankState& own = state(rank);
    LaneState& lane = own.lanes[of];
    if (witness_ != nullptr) witness_->finish(rank, index);
    lane.now_us += work_us(rank, issue(rank, index), !lane.messages.empty());
    if (of == Lane::kCompute) {
      own.now_us = lane.now_us;
      own.blocked_on = -1;
      own.computed = index;
    }
    Origin& done = origin(rank, index);
    done.end_us = lane.now_us;
    const double issued_us = own.issued_us[static_cast<std::size_t>(index)];
    run_.timeline[rank].push_back({index, of, issued_us, done.start_us, done.end_us});
    lane.running = false;
    ++lane.cursor;
  }

  bool pass_message(Owner rank, LaneState* lane, int index) {
    const Message& message = lane->messages[lane->message];
    const Membership own = membership(mesh_, rank, issue(rank, index).lane(), message);
    const auto group = static_cast<std::size_t>(own.group);
    if (!lane->begun) begin_message(rank, lane, index, own);
    const Collective& collective = groups_[group][lane->sequence];
    const bool publishes = schedule::is_publication(collective.kind());
    const bool is_root = own.member == message.root;
    const bool is_exchange = issue(rank, index).lane() == Lane::kSlices;
    if (rendezvous_ || is_exchange || (!publishes && is_root)) {
      if (!collective.is_complete()) return false;
      wait_for(collective.last(), lane, &origin(rank, index));
    } else if (publishes && !is_root) {
      if (!collective.has_come(message.root)) return false;
      wait_for(collective.root(), lane, &origin(rank, index));
    }
    lane->now_us += durations_.message_us(rank, issue(rank, index), message);
    if (witness_ != nullptr && !is_exchange && (publishes || is_root))
      witness_->receive(rank, index, {group, lane->sequence});
    lane->begun = false;
    ++lane->message;
    ++lane->sequence;
    return true;
  }

  static void wait_for(const Arrival& other, LaneState* lane, Origin* origin) {
    if (other.at_us <= lane->now_us) return;
    lane->now_us = other.at_us;
    origin->late.push_back({static_cast<int>(lane->message), other});
  }

  void begin_message(Owner rank, LaneState* lane, int index, const Membership& place) {
    const schedule::Operation& own = issue(rank, index).operation;
    const Lane of = issue(rank, index).lane();
    const Message& message = lane->messages[lane->message];
    const auto [number, member, size, first, stride] = place;
    const auto group = static_cast<std::size_t>(number);
    std::deque<Collective>& collectives = groups_[group];
    while (collectives.size() <= lane->sequence) collectives.emplace_back(own, message, size);
    Collective& collective = collectives[lane->sequence];
    if (!collective.fits(own, message)) {
      run_.violations.push_back(
          core::message("rank ", rank, ", issue ", index, ", ", describe(issue(rank, index)),
                        ": message ", lane->sequence, " of the group has root ", message.root,
                        " and ", message.bytes, " bytes, but another member's is of ",
                        schedule::describe(collective.kind(), collective.subject()), " with root ",
                        collective.message().root, " and ", collective.message().bytes, " bytes"));
    }
    collective.add(member, {lane->now_us, rank, index, static_cast<int>(lane->message)});
    if (witness_ != nullptr && of != Lane::kSlices &&
        (!schedule::is_publication(own.kind) || member == message.root))
      witness_->contribute(rank, index, {group, lane->sequence});
    lane->begun = true;
    for (int other = 0; other < size; ++other) {
      if (other != member && collective.has_come(other)) wake(Owner(first + stride * other));
    }
  }

  void report_blocked() {
    for (const Owner rank : ranks_.indices()) {
      for (const LaneState& lane : ranks_[rank].lanes) {
        if (lane.cursor == lane.issues.size()) continue;
        const int index = lane.issues[lane.cursor];
        if (index >= ranks_[rank].num_issued) continue;
        run_.violations.push_back(
            core::message("rank ", rank, ", issue ", index, ", ", describe(issue(rank, index)),
                          ": waits forever", lane.begun ? " for another member of a group" : ""));
      }
    }
  }

  void report_unmatched() {
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      for (const Collective& collective : groups_[group]) {
        if (collective.is_complete()) continue;
        run_.violations.push_back(
            core::message("group ", group, ": ", collective.num_come(), " of ", collective.size(),
                          " members begin a message of ",
                          schedule::describe(collective.kind(), collective.subject())));
        return;
      }
    }
  }

  const Programs& programs_;
  Durations& durations_;
  bool rendezvous_;
  Witness* witness_;
  Execution run_;
  const schedule::Layout& mesh_;
  core::Vector<Owner, RankState> ranks_;
  std::vector<std::deque<Collective>> groups_;  // as in MessageId
  std::deque<Owner> awake_;
};

}  // namespace

Execution execute(const Programs& programs, Durations& durations, Witness* witness) {
  core::require(!programs.empty() && programs.size() == programs.front().layout->num_owners(),
                "execute: programs: expected one a rank, got ", programs.size());
  return Machine(programs, durations, witness).run();
}

}  // namespace dmuon::simulate
