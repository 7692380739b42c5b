#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace dmuon::newton_schulz {

/// Returns memory that an update needs until its end, uninitialised: of the Scratch that this
/// thread uses, else of the device's allocator.
at::Tensor scratch_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

/// Says that an operator of PyTorch does this work, which no graph of dmuon's kernels holds. A
/// no-op in a thread without a Scratch.
/// @param work  as in "PyTorch multiplies".
void uses_pytorch(const char* work);

/// Memory in which an update finds its tensors at the same addresses each time, as a CUDA graph
/// needs it:
///
///     Scratch measured;
///     { const Scratch::Use use(measured); update(); }  // memory of the device's allocator
///     Scratch memory(device, measured.taken_bytes());
///     { const Scratch::Use use(memory); update(); }    // this memory, from its beginning
///
/// Tensors are views of it, and lie side by side until the use ends. Not thread-safe.
class Scratch {
 public:
  Scratch() = default;
  Scratch(c10::Device device, std::int64_t bytes);

  /// While it lives, this thread uses the Scratch. One a thread.
  class Use {
   public:
    explicit Use(Scratch& scratch);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
  };

  /// Bytes of the last use, each tensor rounded up.
  std::int64_t taken_bytes() const { return taken_; }
  /// The first work of uses_pytorch() in the last use; empty: none.
  const std::string& work_of_pytorch() const { return work_of_pytorch_; }

 private:
  friend at::Tensor scratch_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);
  friend void uses_pytorch(const char* work);

  at::Tensor memory_;
  std::int64_t taken_ = 0;
  std::string work_of_pytorch_;
};

/// True in a thread that uses a Scratch.
bool uses_scratch();

}  // namespace dmuon::newton_schulz
