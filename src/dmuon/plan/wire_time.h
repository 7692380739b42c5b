#pragma once

#include <vector>

#include "dmuon/plan/plan.h"

namespace dmuon::plan {

/// Returns the most bytes that a member receives of a collective: all but the least member's part.
/// NCCL's ring passes as many on.
/// @param parts  bytes of each member, at least one.
double most_received(const std::vector<double>& parts);

/// Returns the bytes that the busiest member of a group of gloo's sends or receives, whichever are
/// more. Members send their parts to each other themselves.
/// @param received   most_received() of the parts.
/// @param most       the largest part.
/// @param publishes  the parts are weights: on more than 4 members a part goes down a tree, so that
///                   its owner sends it log2(members) times, rounded up.
double busiest_direction(double received, double most, int num_members, bool publishes);

/// The time that one step's messages between nodes take on the wire, alone.
struct WireTime {
  double publish_ms = 0;  ///< weights: once a step with node copies, else at every unshard
  double route_ms = 0;    ///< gradients, of one backward
  double bound_ms = 0;    ///< of both, if every node sent and received equally many bytes
};

/// Estimates it. Each node sends and receives at the same time.
///
/// On CPUs units follow each other, and a unit takes as long as its busiest node:
/// - A node receives all weights that it does not own. It sends its own weights to each other node,
///   or on more than 4 nodes down a tree: log2(R) times.
/// - A route is the reverse, without a tree.
/// Predictions of a step (predict/owned.h) also let the next unit fill a direction that one unit
/// leaves idle, so their lanes are busy for less.
///
/// On other devices each column has an adapter, with an equal part of the node's network. NCCL's
/// ring passes every byte of a packed buffer through all members but one. The column with the most
/// bytes decides.
///
/// Latencies, and what trees pass on, are not counted.
/// @param bytes_per_s  of a node in each direction, > 0.
/// @throws InvalidArgument for another.
WireTime wire_time(const Plan& plan, double bytes_per_s);

}  // namespace dmuon::plan
