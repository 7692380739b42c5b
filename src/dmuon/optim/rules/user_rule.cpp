#include "dmuon/optim/rules/user_rule.h"

#include <ATen/ops/where.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::optim {
namespace {

using at::Tensor;

// Views of each matrix in [..., rows, cols], as [out, in].
std::vector<Tensor> matrices_of(const Tensor& all, bool transposed) {
  if (all.dim() == 2) return {transposed ? all.mT() : all};
  std::vector<Tensor> matrices;
  for (const Tensor& part : all.unbind()) {
    for (Tensor& matrix : matrices_of(part, transposed)) matrices.push_back(std::move(matrix));
  }
  return matrices;
}

// All threads in which a user's function runs, or tensors are freed that it has seen.
struct Calls {
  const pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  int num_running = 0;
  bool are_over = false;
};

Calls& calls() {
  static auto* all = new Calls;  // never freed: threads may outlive the program's statics
  return *all;
}

class Running {
 public:
  explicit Running(const std::string& rule) {
    const std::scoped_lock lock(calls().mutex);
    core::require(!calls().are_over, "Muon.step: rule '", rule, "': the program has ended");
    ++calls().num_running;
  }
  ~Running() {
    const std::scoped_lock lock(calls().mutex);
    --calls().num_running;
    calls().changed.notify_all();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

Tensor copy_of(const Tensor& matrix) { return matrix.clone(at::MemoryFormat::Contiguous); }

void check(const std::string& rule, const std::string& what, const Tensor& got,
           const Tensor& expected) {
  if (!got.defined()) core::refuse("Muon.step: rule '", rule, "': ", what, ": expected a tensor");
  core::require(got.layout() == at::kStrided, "Muon.step: rule '", rule, "': ", what,
                ": expected a dense tensor, got a ", got.layout(), " one");
  const bool fits = got.scalar_type() == at::kFloat && got.sizes() == expected.sizes() &&
                    got.device() == expected.device();
  if (fits) return;
  core::refuse("Muon.step: rule '", rule, "': ", what, ": expected Float ", expected.sizes(),
               " on ", expected.device(), ", got ", toString(got.scalar_type()), " ", got.sizes(),
               " on ", got.device());
}

}  // namespace

bool end_user_functions(std::chrono::milliseconds most) {
  if (getpid() != calls().process) return true;
  std::unique_lock lock(calls().mutex);
  calls().are_over = true;
  return calls().changed.wait_for(lock, most, [] { return calls().num_running == 0; });
}

State user_state(std::string name, std::optional<std::int64_t> rows,
                 std::optional<std::int64_t> cols) {
  const auto sizes = [rows, cols](std::int64_t stored_rows, std::int64_t stored_cols,
                                  bool transposed) -> std::array<std::int64_t, 2> {
    if (transposed) return {cols.value_or(stored_rows), rows.value_or(stored_cols)};
    return {rows.value_or(stored_rows), cols.value_or(stored_cols)};
  };
  return {std::move(name), sizes};
}

UserRule::UserRule(const MuonOptions& options, std::shared_ptr<const UserFunction> function)
    : MuonRule(options), function_(std::move(function)), states_(MuonRule::states()) {
  core::require(!function_->moves_weights || !options.cautious_weight_decay,
                "Muon: cautious_weight_decay: expected False with the rule '", function_->name,
                "', which moves the weights itself, got True");
  states_.insert(states_.end(), function_->states.begin(), function_->states.end());
}

UserResult UserRule::called(const UserMatrix& matrix) const {
  const std::string& name = function_->name;
  UserResult result;
  try {
    result = function_->call(matrix);
  } catch (const std::exception& error) {
    core::refuse("Muon.step: rule '", name, "': ", error.what());
  }
  check(name, function_->moves_weights ? "new weights" : "changed update", result.matrix,
        matrix.weights);
  core::invariant(result.states.size() == matrix.states.size(), "UserRule: ", name, ": states");
  for (std::size_t i = 0; i < matrix.states.size(); ++i)
    check(name, "state '" + function_->states[i].name + "'", result.states[i], matrix.states[i]);
  return result;
}

void UserRule::apply(const Piece& piece, const Orthogonalised& orthogonalised) const {
  // The product's result may be of 16 bits, or have padding.
  const Tensor update = orthogonalised.computed(piece.weights.sizes()).to(at::kFloat);
  const auto matrices = [&](const Tensor& all) { return matrices_of(all, piece.transposed); };
  const std::vector<Tensor> updates = matrices(update);
  const std::vector<Tensor> weights = matrices(piece.weights);
  std::vector<std::vector<Tensor>> states;
  for (std::size_t k = 1; k < piece.states.size(); ++k) states.push_back(matrices(piece.states[k]));
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const Running running(function_->name);
    UserMatrix matrix{
        copy_of(updates[i]),
        copy_of(weights[i]),
        {},
        options().lr,
        adjust_lr(options().adjust_lr, options().lr, weights[i].size(0), weights[i].size(1)),
        options().weight_decay,
        options().beta2};
    for (const std::vector<Tensor>& of : states) matrix.states.push_back(copy_of(of[i]));
    const UserResult result = called(matrix);
    const auto put = [&](const Tensor& into, const Tensor& value) {
      into.copy_(at::where(piece.applies, value, into));
    };
    for (std::size_t k = 0; k < states.size(); ++k) put(states[k][i], result.states[k]);
    if (function_->moves_weights)
      put(weights[i], result.matrix);
    else
      updates[i].copy_(result.matrix);
  }
  if (!function_->moves_weights) move_weights(piece, *orthogonalised.elementwise, update);
}

}  // namespace dmuon::optim
