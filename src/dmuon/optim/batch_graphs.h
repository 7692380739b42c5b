#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/kernels/cuda/graph.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::optim {

/// CUDA graphs of an engine's batches: the kernels of a batch's update, launched as one. An
/// optimizer keeps one object and gives it to each step (muon_step).
///
/// 1. In its first step a batch runs by launches, in scratch memory that is measured.
/// 2. In its second one the same calls are captured, in memory that stays, and launched.
/// 3. Later steps launch that graph. Numbers that change lie on the device (StepScalars).
///
/// A graph holds addresses and constants, which its key names. With another key the batch begins
/// anew. Batches whose kernels are not dmuon's alone, or need more scratch memory than a graph may
/// keep, go on by launches; `reports` says why.
///
/// Results have the bits of launches. Batches run one after the other on one stream, as the update
/// lane's do. Not thread-safe.
class BatchGraphs {
 public:
  /// @param most_bytes  of scratch memory, which all batches share. Larger batches keep the device
  ///                    busy for longer than their launches take.
  explicit BatchGraphs(std::int64_t most_bytes) : most_bytes_(most_bytes) {}

  /// What graphs read beside the batches, under addresses that stay.
  struct Inputs {
    at::Tensor applies;          ///< [] bool
    at::Tensor gradient_factor;  ///< [] fp32
    at::Tensor scalars;          ///< [at least num_scalars] fp32
  };
  /// Copies a step's inputs to where graphs read them, on the current stream.
  /// @param gradient_factor  undefined: 1.
  const Inputs& begin_step(const at::Tensor& applies, const at::Tensor& gradient_factor,
                           std::int64_t num_scalars);

  /// One batch under one key.
  struct Program {
    std::string key;
    std::string reason;  ///< why there is no graph, in one sentence; empty: there is or will be one
    bool has_run = false;
    std::int64_t scratch_bytes = 0;
    std::unique_ptr<kernels::cuda::Graph> graph;
  };
  /// Returns the batch's program with this key, a new one if there is none. It stays valid until
  /// the batch's next call.
  Program& program_of(core::BatchIndex batch, const std::string& key);

  /// Runs the batch's update once: by `work`, by a graph that captures it, or by a graph that has.
  /// @param work  the batch's whole update. It takes memory by scratch_tensor() alone.
  void run(Program& program, const std::function<void()>& work);

  /// Says why no batch has a graph, in one sentence.
  void refuse(std::string reason) { refused_ = std::move(reason); }

  /// Returns a sentence for each batch that has had a step.
  std::vector<std::string> reports() const;

  std::int64_t num_captures() const { return num_captures_; }
  std::int64_t num_launches() const { return num_launches_; }
  /// Bytes of scratch memory that graphs keep.
  std::int64_t scratch_bytes() const { return kept_bytes_; }

 private:
  void measure(Program& program, const std::function<void()>& work);
  void capture(Program& program, const std::function<void()>& work);
  void make_room();

  std::int64_t most_bytes_;
  Inputs inputs_;
  std::string refused_;
  std::map<core::BatchIndex, std::deque<Program>> programs_;  // the newest first
  std::unique_ptr<newton_schulz::Scratch> kept_;
  std::int64_t kept_bytes_ = 0;
  std::int64_t num_captures_ = 0;
  std::int64_t num_launches_ = 0;
};

}  // namespace dmuon::optim
