#include "dmuon/optim/batch_graphs.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/cuda_kernels.h"

namespace dmuon::optim {
namespace {

using newton_schulz::Scratch;

// Of a batch: a step without a gradient of some matrices, and one with all, may alternate.
constexpr std::size_t kMostPrograms = 4;

void* stream_of(const at::Tensor& tensor) { return newton_schulz::current_stream(tensor.device()); }

}  // namespace

const BatchGraphs::Inputs& BatchGraphs::begin_step(const at::Tensor& applies,
                                                   const at::Tensor& gradient_factor,
                                                   std::int64_t num_scalars) {
  const auto options = applies.options().dtype(at::kFloat);
  if (!inputs_.applies.defined()) {
    inputs_.applies = at::empty({}, applies.options());
    inputs_.gradient_factor = at::empty({}, options);
  }
  if (!inputs_.scalars.defined() || inputs_.scalars.numel() < num_scalars)
    inputs_.scalars = at::empty({num_scalars}, options);
  inputs_.applies.copy_(applies);
  if (gradient_factor.defined()) {
    inputs_.gradient_factor.copy_(gradient_factor);
  } else {
    inputs_.gradient_factor.fill_(1);
  }
  return inputs_;
}

BatchGraphs::Program& BatchGraphs::program_of(core::BatchIndex batch, const std::string& key) {
  std::deque<Program>& all = programs_[batch];
  const auto found = std::ranges::find(all, key, &Program::key);
  if (found != all.end()) {
    std::rotate(all.begin(), found, found + 1);
    return all.front();
  }
  if (all.size() == kMostPrograms) all.pop_back();
  all.emplace_front().key = key;
  return all.front();
}

void BatchGraphs::run(Program& program, const std::function<void()>& work) {
  if (!program.reason.empty()) return work();
  if (!program.has_run) return measure(program, work);
  if (program.graph == nullptr) capture(program, work);
  if (program.graph == nullptr) return work();
  program.graph->launch(stream_of(inputs_.applies));
  ++num_launches_;
}

void BatchGraphs::measure(Program& program, const std::function<void()>& work) {
  Scratch memory;
  {
    const Scratch::Use use(memory);
    work();
  }
  program.has_run = true;
  program.scratch_bytes = memory.taken_bytes();
  if (!memory.work_of_pytorch().empty()) {
    program.reason = "launches: PyTorch " + memory.work_of_pytorch();
  } else if (program.scratch_bytes > most_bytes_) {
    program.reason = core::message("launches: the update needs more than ", most_bytes_ >> 20,
                                   " MiB of scratch memory");
  }
}

// Sets no graph if the driver refuses one.
void BatchGraphs::capture(Program& program, const std::function<void()>& work) {
  make_room();
  try {
    const Scratch::Use use(*kept_);
    program.graph = std::make_unique<kernels::cuda::Graph>(stream_of(inputs_.applies), work);
    ++num_captures_;
  } catch (const core::CudaError& error) {
    program.reason = core::message("launches: ", error.what());
  }
}

// Graphs hold addresses of the memory, so a larger one is for new graphs.
void BatchGraphs::make_room() {
  std::int64_t needed = 0;
  for (auto& [batch, all] : programs_) {
    for (const Program& program : all) {
      if (program.reason.empty()) needed = std::max(needed, program.scratch_bytes);
    }
  }
  if (kept_ != nullptr && needed <= kept_bytes_) return;
  for (auto& [batch, all] : programs_)
    for (Program& program : all) program.graph.reset();
  kept_ = std::make_unique<Scratch>(inputs_.applies.device(), needed);
  kept_bytes_ = needed;
}

std::vector<std::string> BatchGraphs::reports() const {
  if (!refused_.empty()) return {refused_};
  std::vector<std::string> sentences;
  for (const auto& [batch, all] : programs_) {
    const Program& newest = all.front();
    const std::string how = !newest.reason.empty()    ? newest.reason
                            : newest.graph != nullptr ? "a graph"
                                                      : "launches: the next step captures them";
    sentences.push_back(core::message("batch ", batch, ": ", how));
  }
  return sentences;
}

}  // namespace dmuon::optim
