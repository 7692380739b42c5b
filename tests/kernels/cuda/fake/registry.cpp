#include "tests/kernels/cuda/fake/registry.h"

#include "dmuon/kernels/cuda/move_weights.h"

namespace dmuon::kernels::cuda::fake {
namespace {

using emulator::Access;
using emulator::Buffer;

Buffer matrices(const char* name, const void* base, std::size_t entry_bytes, std::size_t batch,
                int rows, int cols, std::int64_t row_stride, std::int64_t batch_stride,
                Access access) {
  return {.name = name,
          .base = base,
          .row_bytes = static_cast<std::size_t>(cols) * entry_bytes,
          .rows = static_cast<std::size_t>(rows),
          .row_pitch = static_cast<std::size_t>(row_stride) * entry_bytes,
          .batch = batch,
          .batch_pitch = static_cast<std::size_t>(batch_stride) * entry_bytes,
          .access = access};
}

Buffer array(const char* name, const void* base, std::size_t bytes, Access access) {
  return {.name = name, .base = base, .row_bytes = bytes, .access = access};
}

std::vector<Buffer> move_weights_buffers(const void* parameters, unsigned batch,
                                         std::ptrdiff_t to_host) {
  const auto& p = *static_cast<const MoveWeightsParameters*>(parameters);
  std::vector<Buffer> buffers{array("applies", p.applies, 1, Access::kRead)};
  if (p.applies[to_host] == 0) return buffers;
  buffers.push_back(matrices("w", p.w, 4, batch, p.rows, p.cols, p.w_row_stride, p.w_batch_stride,
                             Access::kUpdate));
  buffers.push_back(matrices("u", p.u, 2, batch, p.rows, p.cols, p.u_row_stride, p.u_batch_stride,
                             Access::kRead));
  return buffers;
}

template <typename Parameters, void (*kBody)(const Parameters&)>
HostKernel kernel(decltype(HostKernel::buffers) buffers) {
  return {sizeof(Parameters),
          [](const void* parameters) { kBody(*static_cast<const Parameters*>(parameters)); },
          buffers};
}

}  // namespace

const std::map<std::string, HostKernel>& kernels() {
  static const std::map<std::string, HostKernel> kKernels{
      {"move_weights_f16",
       kernel<MoveWeightsParameters, device::move_weights<device::Fp16>>(move_weights_buffers)},
      {"move_weights_bf16",
       kernel<MoveWeightsParameters, device::move_weights<device::BFloat16>>(move_weights_buffers)},
  };
  return kKernels;
}

}  // namespace dmuon::kernels::cuda::fake
