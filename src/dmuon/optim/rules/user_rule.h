#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/optim/rules/muon.h"

namespace dmuon::optim {

/// One matrix as a user's rule reads it: as [out, in], however it is stored. All tensors are fp32
/// and on the matrix's device. They are copies, which the rule may change.
struct UserMatrix {
  at::Tensor update;               ///< [rows, cols], orthogonalised
  at::Tensor weights;              ///< [rows, cols]
  std::vector<at::Tensor> states;  ///< in the order of UserFunction::states
  double lr;
  double adjusted_lr;
  double weight_decay;
  double beta2;
};

/// The answer of a user's rule. Tensors are fp32, of the sizes and on the device of what they
/// replace.
struct UserResult {
  at::Tensor matrix;               ///< the changed update, or the new weights
  std::vector<at::Tensor> states;  ///< the new ones
};

/// A rule of update that a user has written. `call` comes on the update lane's thread, one matrix
/// after the other, with gradients off and the lane's stream current. All ranks get
/// what it throws as an error of the update.
struct UserFunction {
  std::string name;
  std::vector<State> states;   ///< beside the momentum; made by user_state
  bool moves_weights = false;  ///< True if `call` returns the new weights instead of an update
  std::function<UserResult(const UserMatrix&)> call;
};

/// Lets no user's function begin any more, and waits until none runs, for at most so long. A
/// program calls it when it ends, because threads must not come back to its interpreter later.
/// Updates then fail. A no-op in a forked child.
/// @returns  false if a function still runs.
bool end_user_functions(std::chrono::milliseconds most);

/// Returns a state with these sizes for a matrix that is [out, in]; nullopt means the matrix's own
/// rows or columns. A matrix that is stored transposed has its state transposed too.
State user_state(std::string name, std::optional<std::int64_t> rows,
                 std::optional<std::int64_t> cols);

/// Muon whose orthogonalised update O a function of the user's changes:
///
/// - weights = (1 - lr weight_decay) weights - adjusted_lr call(O), or
/// - weights = call(O), if the function moves the weights itself.
///
/// The function sees one matrix at a time, so a matrix has the same bits alone and in a batch. A
/// step that does not apply changes neither weights nor states, whatever the function returns.
class UserRule final : public MuonRule {
 public:
  /// @throws InvalidArgument for cautious weight decay with a function that moves the weights.
  UserRule(const MuonOptions& options, std::shared_ptr<const UserFunction> function);

  const std::vector<State>& states() const override { return states_; }
  /// @throws InvalidArgument naming the rule, if the function throws, or returns a tensor of
  /// another dtype, other sizes or another device.
  void apply(const Piece& piece, const Orthogonalised& update) const override;

 private:
  UserResult called(const UserMatrix& matrix) const;

  std::shared_ptr<const UserFunction> function_;
  std::vector<State> states_;
};

}  // namespace dmuon::optim
