// The operations on batches of engine::Executor.

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/executor.h"

namespace dmuon::engine {

using schedule::Kind;

// The ranks of a slot exchange slices in an update, and whoever waits for one waits for them.
void Executor::set_update(std::shared_ptr<Update> update) {
  if (!update) return update_.reset();
  StepUpdate made{.update = std::move(update),
                  .when = when(),
                  .after_operation = mesh_.watch->num_operations()};
  if (mesh_.tensor_parallel) made.number = mesh_.watch->reach(watch::Rendezvous::kUpdate, "");
  update_ = std::make_shared<const StepUpdate>(std::move(made));
}

std::string Executor::described(core::BatchIndex batch, const StepUpdate& of) const {
  const auto& parameters = owned_.batches()[batch].parameters;
  std::string text = "the update of '" + part_.parameters[parameters.front()].name + "'";
  if (parameters.size() > 1) text += core::message(" and ", parameters.size() - 1, " more");
  return text + " " + of.when;
}

void Executor::enqueue_update(const schedule::Operation& operation) {
  core::invariant(update_ != nullptr, "Executor: no update for an operation on a batch");
  enqueue(operation, [this, of = update_, kind = operation.kind, batch = operation.batch(),
                      num_threads = at::get_num_threads()] {
    // A thread keeps the number that it found when it first computed.
    if (at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
    try {
      if (kind == Kind::kPrepare) of->update->prepare(batch);
      if (kind == Kind::kGather) of->update->gather(batch);
      if (kind == Kind::kOrthogonalise) of->update->orthogonalise(batch);
      if (kind == Kind::kScatter) of->update->scatter(batch);
      if (kind == Kind::kApply) of->update->apply(batch);
    } catch (const core::CommError&) {  // the wait for its slices tells of it
      throw;
    } catch (c10::Error& error) {
      tell_of_failed_update(batch, *of, error.what_without_backtrace());
      error.add_context("dmuon: in " + described(batch, *of));
      throw;
    } catch (const std::exception& error) {
      tell_of_failed_update(batch, *of, error.what());
      throw std::runtime_error("dmuon: in " + described(batch, *of) + ": " + error.what());
    }
  });
}

// Publications that wait for a failed update send nothing, so other ranks would wait in vain: for
// this model's, and for those of others that the mesh's lanes hold.
void Executor::tell_of_failed_update(core::BatchIndex batch, const StepUpdate& of,
                                     const std::string& why) const {
  mesh_.watch->over_after(of.after_operation, of.number - 1,
                          described(batch, of) + " has failed: " + why);
}

// Without tensor parallelism no other rank takes part in an update.
void Executor::finish_update(Kind kind, const schedule::Subject& subject, const Newest& awaited) {
  if (mesh_.tensor_parallel) {
    mesh_.watch->wait_for(awaited.done, watch::Rendezvous::kUpdate, awaited.number, [&] {
      return schedule::describe(kind, subject) + ", whose slices the ranks of a slot exchange, " +
             when();
    });
  } else {
    try {
      awaited.done.wait();
    } catch (...) {
      mesh_.watch->raised();
      throw;
    }
  }
  update_awaited_.set(pool_->device());
}

}  // namespace dmuon::engine
