#pragma once

#include <ATen/core/Tensor.h>

#include "dmuon/core/index.h"

namespace dmuon::engine {

/// The tensors that stand in modules for leaves, and what the user has done to their gradients.
///
/// He clears a gradient by taking the placeholder's `.grad` away. Local. Not thread-safe.
class Placeholders {
 public:
  using PerLeaf = core::Vector<core::LeafIndex, bool>;
  using Tensors = core::Vector<core::LeafIndex, at::Tensor>;

  /// No leaf has a placeholder, so nobody can clear its gradient.
  explicit Placeholders(int num_leaves);

  /// @param gradients  they become `.grad` of the placeholders.
  void set(Tensors placeholders, Tensors gradients);

  /// Lets gradients of the leaf's placeholder accumulate into `parameter`.
  void accumulate(core::LeafIndex leaf, const at::Tensor& parameter) const;

  /// A backward has ended: what trains has a gradient.
  void give_gradients();

  /// The leaf's gradient is gone.
  void forget_gradient(core::LeafIndex leaf) { given_.at(leaf) = false; }

  /// [leaves] true unless the leaf's gradient has been cleared.
  PerLeaf kept() const;

  /// True if all gradients have been cleared, and any leaf trains.
  bool all_cleared() const;

  /// Notes which gradients a backward has given and the user has cleared since.
  void note_cleared();
  void forget_cleared() { cleared_ = PerLeaf(cleared_.size(), false); }
  /// [leaves] what was noted.
  const PerLeaf& cleared() const { return cleared_; }

 private:
  Tensors placeholders_;  // empty if no leaf has one
  Tensors gradients_;
  PerLeaf given_;  // a backward has given it, and it has not gone since
  PerLeaf cleared_;
};

}  // namespace dmuon::engine
