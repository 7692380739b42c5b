#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "dmuon/newton_schulz/method.h"
#include "dmuon/optim/rules/rule.h"
#include "dmuon/optim/step_scalars.h"
#include "dmuon/wire/owned.h"

namespace dmuon::optim {

/// One parameter group, as it is at this step.
struct MuonGroup {
  std::shared_ptr<const Rule> rule;
  newton_schulz::IterationOptions iteration;
  newton_schulz::Choices choices = {};  ///< of the shapes that were tuned

  /// Returns `iteration` with the choice for matrices of these sizes, if they were tuned.
  newton_schulz::IterationOptions iteration_of(std::int64_t rows, std::int64_t cols) const;
};

/// Returns what the owner stores of a batch's parameters from `begin` to `end`, with the rule's
/// states. The step's own tensors are left to the caller.
Piece stored_piece(const wire::OwnedBatch& batch, std::size_t begin, std::size_t end,
                   const Rule& rule);

/// Returns the rows of stored matrices that are orthogonalised together: views for a BatchUpdate.
/// @param stored  tensors [b, rows, cols], contiguous; memo [b, 1, words * row_parts().size()].
/// @param part    at this place of view.row_parts().
Piece part_of(const Piece& stored, const layout::View& view, std::size_t part);

/// The update of a batch of equally shaped matrices, in three calls, once each:
///
///     BatchUpdate update(group, batch);
///     update.prepare();        // states move; the iteration's starts exist
///     update.orthogonalise();  // all of Newton-Schulz but its last products
///     update.apply();          // weights move
///
/// Each call goes through the same pieces (Method::pieces_of) and frees a piece's operands as soon
/// as it has used them. The calls need gradients off, use the current stream, and wait for no
/// accelerator. They may come from different threads, one at a time.
///
/// Between the calls memory of all pieces lives. `run` replaces the three: it takes one piece after
/// the other through all of them, with the same bits and the memory of one piece.
class BatchUpdate {
 public:
  /// @param batch          tensors [b, rows, cols], contiguous, or a part_of these; or
  ///                       [b, groups, height, cols], interleaved rows of b matrices, which are
  ///                       gathered while a piece is updated.
  /// @param column_blocks  divides cols: the number of equal blocks of columns of each matrix that
  ///                       are orthogonalised apart. 1 if rows are interleaved.
  /// @param scalars        of the step, which other updates may share, with those of the group's
  ///                       rule at `place`; null: this object's own.
  /// @throws InvalidArgument as newton_schulz::method_for.
  BatchUpdate(const MuonGroup& group, Piece batch, std::int64_t column_blocks = 1,
              std::shared_ptr<StepScalars> scalars = nullptr, std::size_t place = 0);

  void prepare();
  void orthogonalise();
  void apply();

  void run();

 private:
  newton_schulz::Start prepared(Piece& piece) const;
  Orthogonalised orthogonalised(newton_schulz::Start start) const;
  void applied(const Piece& piece, const Orthogonalised& update) const;

  std::shared_ptr<const Rule> rule_;
  std::optional<newton_schulz::Method> method_;  // unset: no pieces
  bool interleaved_;
  std::vector<Piece> pieces_;
  std::shared_ptr<StepScalars> scalars_;
  std::size_t place_;
  std::vector<newton_schulz::Start> starts_;
  std::vector<Orthogonalised> orthogonalised_;
};

}  // namespace dmuon::optim
