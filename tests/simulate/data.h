#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dmuon/simulate/execution.h"

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

/// What the buffers of all ranks hold while the programs run.
class Data : public Witness {
 public:
  /// @param programs    kept by reference.
  /// @param violations  sentences are appended.
  Data(const Programs& programs, bool node_copy, std::vector<std::string>* violations);

  void start(core::Owner rank, int index) override;
  void contribute(core::Owner rank, int index, MessageId message) override;
  void receive(core::Owner rank, int index, MessageId message) override;
  void finish(core::Owner rank, int index) override;

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

  const Issue& issue(core::Owner rank, int index) const { return programs_[rank].issue(index); }
  const schedule::Layout& layout(core::Owner rank) const { return *programs_[rank].layout; }
  Value masters(core::Owner rank, core::UnitIndex unit) const;
  std::size_t tensor_rank(core::Owner rank) const {
    return static_cast<std::size_t>(rank.value() % layout(rank).tensor_parallel);
  }
  bool owns_part(core::Owner rank, core::UnitIndex unit) const {
    return layout(rank).units[unit].owner_elements[layout(rank).slot_of(rank)] > 0;
  }
  Value contribution(core::Owner rank, int index) const;
  void take(core::Owner rank, int index, const Value& value);
  void check_part(core::Owner rank, int index);
  void check_weights(core::Owner rank, int index);
  void check_gradients(core::Owner rank, int index);
  void apply(core::Owner rank, int index);
  template <typename... Parts>
  void report(core::Owner rank, int index, Parts&&... parts);

  const Programs& programs_;
  bool node_copy_;
  std::vector<std::string>* violations_;
  core::Vector<core::Owner, RankData> ranks_;
  std::map<MessageId, Value> messages_;
  // [T][steps] by all ranks with the same slices
  std::vector<std::vector<core::Vector<core::UnitIndex, std::uint64_t>>> contributed_;
};

}  // namespace dmuon::simulate
