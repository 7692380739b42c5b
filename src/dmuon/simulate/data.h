#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/simulate/program.h"

namespace dmuon::simulate {

/// What stands in a buffer, or travels, in place of elements.
struct Value {
  // Of weights: their oldest and newest version. Nothing: oldest > newest.
  int oldest = 1 << 30;
  int newest = -1;
  // Of gradients: the sum of one random number for each contribution. Sums modulo 2^64 are equal
  // only if they have the same terms, but for a chance of about 2^-64.
  std::uint64_t sum = 0;

  void merge(const Value& other);  ///< side by side for weights, added for gradients
};

/// What the buffers of all ranks hold while the programs run. Ranks' operations must be started
/// and finished in an order that their programs allow. An operation is named by its rank's slot and
/// its place in that rank's program.
class Data {
 public:
  /// @param programs    kept by reference.
  /// @param violations  sentences are appended.
  Data(const Programs& programs, bool node_copy, std::vector<std::string>* violations);

  /// An operation begins.
  void start(core::Slot slot, int index);

  /// What the rank puts into the operation's next message: a root's weights, a member's gradients.
  Value contribution(core::Slot slot, int index) const;

  /// What comes of a message: to every member what the root published, to the root what members
  /// routed to it.
  void receive(core::Slot slot, int index, const Value& value);

  /// An operation ends, all its messages being done.
  void finish(core::Slot slot, int index);

 private:
  struct Buffers {
    Value part;    // of weights: the node copy, or this column's part of the packed buffer
    Value packed;  // weights
    Value packed_gradients;
    Value node_sum;
    Value total;             // gradients that the owner has accumulated since the start
    Value expected;          // what the other ranks and this one have put in until `expected_step`
    int expected_step = -1;  // the last whose contributions are in `expected`
    std::vector<core::BatchIndex> batches;  // of this rank that touch the unit
  };
  struct RankData {
    core::Vector<core::UnitIndex, Buffers> units;
    core::Vector<core::BatchIndex, int> versions;
  };

  const Issue& issue(core::Slot slot, int index) const { return programs_[slot].issue(index); }
  const schedule::Layout& layout(core::Slot slot) const { return *programs_[slot].layout; }
  Value masters(core::Slot slot, core::UnitIndex unit) const;
  bool owns_part(core::Slot slot, core::UnitIndex unit) const {
    return layout(slot).units[unit].owner_elements[slot] > 0;
  }
  void check_part(core::Slot slot, int index);
  void check_weights(core::Slot slot, int index);
  void update(core::Slot slot, int index);
  template <typename... Parts>
  void report(core::Slot slot, int index, Parts&&... parts);

  const Programs& programs_;
  bool node_copy_;
  std::vector<std::string>* violations_;
  core::Vector<core::Slot, RankData> ranks_;
  std::vector<core::Vector<core::UnitIndex, std::uint64_t>> contributed_;  // [steps] by all ranks
};

}  // namespace dmuon::simulate
