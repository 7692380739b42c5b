// The operations on batches of engine::Executor.

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/executor.h"

namespace dmuon::engine {

using schedule::Kind;

// The ranks of a slot exchange slices in an update, and whoever waits for one waits for them.
void Executor::set_update(std::shared_ptr<Update> update) {
  update_ = std::move(update);
  if (!update_) return;
  before_update_ = mesh_.watch->num_operations();
  update_when_ = when();
  if (mesh_.tensor_parallel) num_updates_ = mesh_.watch->reach(watch::Rendezvous::kUpdate, "");
}

std::string Executor::described(core::BatchIndex batch) const {
  const auto& parameters = owned_.batches()[batch].parameters;
  std::string text = "the update of '" + part_.parameters[parameters.front()].name + "'";
  if (parameters.size() > 1) text += core::message(" and ", parameters.size() - 1, " more");
  return text + " " + update_when_;
}

void Executor::enqueue_update(const schedule::Operation& operation) {
  core::invariant(update_ != nullptr, "Executor: no update for an operation on a batch");
  enqueue(operation,
          [update = update_, kind = operation.kind, batch = operation.batch(),
           described = "in " + described(operation.batch()), num_threads = at::get_num_threads()] {
            // A thread keeps the number that it found when it first computed.
            if (at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
            try {
              if (kind == Kind::kPrepare) update->prepare(batch);
              if (kind == Kind::kGather) update->gather(batch);
              if (kind == Kind::kOrthogonalise) update->orthogonalise(batch);
              if (kind == Kind::kScatter) update->scatter(batch);
              if (kind == Kind::kApply) update->apply(batch);
            } catch (c10::Error& error) {  // raised where the program is elsewhere
              error.add_context("dmuon: " + described);
              throw;
            }
          });
}

// Without tensor parallelism no other rank takes part in an update.
void Executor::finish_update(Kind kind, const schedule::Subject& subject, const Newest& awaited) {
  if (mesh_.tensor_parallel) {
    return finish(watch::Rendezvous::kUpdate, awaited.done, awaited.number, [&] {
      return schedule::describe(kind, subject) + ", whose slices the ranks of a slot exchange, " +
             when();
    });
  }
  wait_for_update(awaited.done);
}

void Executor::wait_for_update(const wire::Event& event) {
  try {
    event.wait();
  } catch (const core::CommError&) {  // the wait's, which tells of it
    throw;
  } catch (const std::exception& error) {
    tell_of_failed_update(error.what());
    throw;
  }
}

// Publications that wait for a failed update send nothing, so others wait in vain.
void Executor::tell_of_failed_update(const std::string& why) {
  for (const core::BatchIndex batch : batches_.indices()) {
    if (!batches_[batch][Kind::kApply].done.has_failed()) continue;
    mesh_.watch->over_after(before_update_, num_updates_ - 1,
                            described(batch) + " has failed: " + why);
    return;
  }
}

}  // namespace dmuon::engine
