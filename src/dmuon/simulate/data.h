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
/// and finished in an order that their programs allow.
class Data {
 public:
  /// @param programs    [slots], kept by reference.
  /// @param violations  sentences are appended.
  Data(const std::vector<Program>& programs, bool node_copy, std::vector<std::string>* violations);

  /// An operation begins.
  void start(int slot, int index);

  /// What the rank puts into the operation's next message: a root's weights, a member's gradients.
  Value contribution(int slot, int index) const;

  /// What comes of a message: to every member what the root published, to the root what members
  /// routed to it.
  void receive(int slot, int index, const Value& value);

  /// An operation ends, all its messages being done.
  void finish(int slot, int index);

 private:
  struct Buffers {
    Value part;    // of weights: the node copy, or this column's part of the packed buffer
    Value packed;  // weights
    Value packed_gradients;
    Value node_sum;
    Value total;             // gradients that the owner has accumulated since the start
    Value expected;          // what the other ranks and this one have put in until `expected_step`
    int expected_step = -1;  // the last whose contributions are in `expected`
  };

  const Issue& issue(int slot, int index) const;
  Buffers& buffers(int slot, int unit);
  const Buffers& buffers(int slot, int unit) const;
  Value masters(int slot, int unit) const;
  bool owns_part(int slot, int unit) const;
  void check_part(int slot, int index);
  void check_weights(int slot, int index);
  void update(int slot, int index);
  template <typename... Parts>
  void report(int slot, int index, Parts&&... parts);

  const std::vector<Program>& programs_;
  bool node_copy_;
  std::vector<std::string>* violations_;
  std::size_t num_units_;
  std::vector<Buffers> buffers_;                           // [slots][units]
  std::vector<std::vector<int>> batch_versions_;           // [slots][batches of the slot]
  std::vector<std::vector<std::vector<int>>> batches_of_;  // [slots][units][...]
  std::vector<std::vector<std::uint64_t>> contributed_;    // [steps][units] by all ranks
};

}  // namespace dmuon::simulate
