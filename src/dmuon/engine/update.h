#pragma once

#include "dmuon/core/index.h"

namespace dmuon::engine {

/// The update of one step, of the batches that a rank owns. The engine runs its operations on the
/// update lane; an optimizer implements them and holds what lies between them:
///
///     engine.step(std::make_shared<MyUpdate>(engine.owned(), hyperparameters));
///
/// An Update holds the hyperparameters of its call. For each batch the engine calls prepare,
/// orthogonalise and apply, in this order and once each. With tensor parallelism it calls gather
/// and scatter in between, on a lane of their own. Batches may follow each other, or overlap.
///
/// Threads: on a CPU the calls come on the lanes' threads, one at a time for each lane and batch,
/// with as many threads for at::parallel_for as the thread that called step() has. Elsewhere they
/// come on that thread itself, and the current stream is the lane's. What a call has allocated,
/// and another lane reads, must live until apply(). Gradients are off. An exception reaches the
/// caller of step(), and every rank that waits for the batch's weights raises.
class Update {
 public:
  Update() = default;
  virtual ~Update() = default;
  Update(const Update&) = delete;
  Update& operator=(const Update&) = delete;

  /// Reads the batch's gradients and changes its momentum: all that the iteration starts from.
  virtual void prepare(core::BatchIndex batch) = 0;
  /// Brings what prepare() left to the ranks of the slot that orthogonalise it.
  virtual void gather(core::BatchIndex /*batch*/) {}
  /// Orthogonalises what prepare() or gather() left.
  virtual void orthogonalise(core::BatchIndex batch) = 0;
  /// Brings the results to the ranks of the slot that keep the weights.
  virtual void scatter(core::BatchIndex /*batch*/) {}
  /// Changes the batch's masters, and frees what the batch held.
  virtual void apply(core::BatchIndex batch) = 0;
};

}  // namespace dmuon::engine
