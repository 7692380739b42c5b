#pragma once

#include <compare>
#include <cstddef>
#include <string>
#include <vector>

#include "dmuon/simulate/program.h"

namespace dmuon::simulate {

/// Says how long everything takes that ranks issue, in virtual microseconds.
class Durations {
 public:
  virtual ~Durations() = default;
  /// The compute of a module, or an operation on a batch.
  virtual double work_us(core::Owner rank, const Issue& issue) = 0;
  /// One message of an operation on a unit.
  virtual double message_us(core::Owner rank, const Issue& issue,
                            const schedule::Message& message) = 0;
  /// The time that a lane stands still for an operation on a unit without messages of this rank's
  /// group. Other groups may use the link then.
  virtual double idle_us(core::Owner, const Issue&) { return 0; }
  /// True: a collective ends when all members have begun it. False: a broadcast ends at a member
  /// when its root has begun it, and a reduction ends at its root when all have begun it. An
  /// exchange of slices always ends when all have begun it.
  virtual bool rendezvous() const { return false; }
};

/// One operation on its lane, in virtual time.
struct SimulatedSpan {
  int issue;  ///< index in the rank's program
  schedule::Lane lane;
  double issued_us;
  double start_us;  ///< when everything that it waits for was done
  double end_us;
};

/// A member that comes to a message.
struct Arrival {
  double at_us = -1;
  core::Owner rank{};
  int issue = -1;    ///< the operation, in its program
  int message = -1;  ///< which of that operation's
};

/// The member that one of an operation's messages waited for.
struct LateMember {
  int message = 0;  ///< which of the operation's
  Arrival arrival{};
};

/// Records what an operation waited for. See critical_path().
struct Origin {
  static constexpr double kNotDone = -1;
  int after = -1;  ///< the operation of this rank at whose end it started; -1: none
  double start_us = 0;
  double end_us = kNotDone;
  std::vector<LateMember> late{};  ///< in the order of its messages
};

struct Execution {
  std::vector<std::string> violations;  ///< sentences: messages that do not fit, and what hangs
  core::PerOwner<std::vector<SimulatedSpan>> timeline;  ///< in the order of completion
  core::PerOwner<std::vector<Origin>> origins;          ///< [issues]
};

/// A message by its place in its group. Rows and columns of the first ranks of slots are groups
/// [0, R) and [R, R + G), those of the second ones follow, and so on; slots come last.
struct MessageId {
  std::size_t group;
  std::size_t place;
  auto operator<=>(const MessageId&) const = default;
};

/// Sees the operations of all ranks in an order that their programs allow. An operation is named by
/// its rank's number and its place in that rank's program.
class Witness {
 public:
  virtual ~Witness() = default;
  virtual void start(core::Owner rank, int index) = 0;
  /// A root's weights, or a member's gradients, enter the message.
  virtual void contribute(core::Owner rank, int index, MessageId message) = 0;
  /// A member receives the root's weights, or the root receives the members' gradients.
  virtual void receive(core::Owner rank, int index, MessageId message) = 0;
  /// All its messages are done.
  virtual void finish(core::Owner rank, int index) = 0;
};

/// Runs the programs of all ranks in virtual time, lanes and messages as schedule::Operation says.
/// But here a lane does one operation after the other: messages of a link take turns anyway.
///
/// The machine takes ranks in turn; each goes on until all its lanes wait. This is no order of
/// events: a span's times are the longest path that leads to it. One run stands for all timings:
/// lanes are queues and messages are matched by their place, so timing does not decide which
/// operations run (Kahn 1974). Only the timeline differs.
///
/// @param programs  at least one; layouts may differ, meshes may not.
/// @param witness   nullptr: nothing is reported.
/// @throws InvalidArgument for a number of programs that does not fit the mesh.
Execution execute(const Programs& programs, Durations& durations, Witness* witness = nullptr);

}  // namespace dmuon::simulate
