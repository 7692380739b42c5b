#include "dmuon/newton_schulz/scratch.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::newton_schulz {
namespace {

constexpr std::int64_t kRounding = 512;  // as PyTorch aligns its blocks

thread_local Scratch* in_use = nullptr;

}  // namespace

Scratch::Scratch(c10::Device device, std::int64_t bytes)
    : memory_(at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte))) {}

Scratch::Use::Use(Scratch& scratch) {
  core::invariant(in_use == nullptr, "Scratch: this thread uses one already");
  scratch.taken_ = 0;
  scratch.work_of_pytorch_.clear();
  in_use = &scratch;
}

Scratch::Use::~Use() { in_use = nullptr; }

at::Tensor scratch_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (in_use == nullptr) return at::empty(sizes, options);
  auto bytes = static_cast<std::int64_t>(options.dtype().itemsize());
  for (const std::int64_t size : sizes) bytes *= size;
  const std::int64_t rounded = (bytes + kRounding - 1) / kRounding * kRounding;
  const std::int64_t begin = std::exchange(in_use->taken_, in_use->taken_ + rounded);
  if (!in_use->memory_.defined()) return at::empty(sizes, options);
  const at::Tensor& memory = in_use->memory_;
  core::invariant(begin + bytes <= memory.numel(), "Scratch: an update needs more than its ",
                  memory.numel(), " bytes");
  return memory.narrow(0, begin, bytes)
      .view(c10::typeMetaToScalarType(options.dtype()))
      .view(sizes);
}

void uses_pytorch(const char* work) {
  if (in_use != nullptr && in_use->work_of_pytorch_.empty()) in_use->work_of_pytorch_ = work;
}

bool uses_scratch() { return in_use != nullptr; }

}  // namespace dmuon::newton_schulz
