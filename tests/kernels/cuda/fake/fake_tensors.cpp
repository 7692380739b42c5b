// The driver's tensor maps: a TiledMap of the emulator instead of what TMA reads.
#include <cuda.h>

#include <cstring>

#include "tests/kernels/cuda/emulator/tiles.h"
#include "tests/kernels/cuda/fake/calls.h"

using namespace dmuon::kernels::cuda::fake;
using dmuon::kernels::cuda::TensorMap;
using dmuon::kernels::cuda::emulator::TiledMap;

namespace {

constexpr cuuint64_t kMostBytes = cuuint64_t{1} << 40;  // of a stride, exclusive
constexpr cuuint64_t kMostEntries = cuuint64_t{1} << 32;

// What the driver requires of the sizes of a tensor of 16-bit entries.
bool are_valid(cuuint32_t rank, const cuuint64_t* sizes, const cuuint64_t* strides,
               const cuuint32_t* box, const cuuint32_t* steps) {
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > kMostEntries) return false;
    if (box[i] == 0 || box[i] > 256 || steps[i] == 0 || steps[i] > 8) return false;
    if (i + 1 == rank) break;
    if (strides[i] % 16 != 0 || strides[i] >= kMostBytes) return false;
    if (i == 0 && strides[0] < 2 * sizes[0]) return false;
  }
  return true;
}

}  // namespace

extern "C" {

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  DMUON_DEVICE_LOCKED;
  if (device.limits().capability < 90) return CUDA_ERROR_NOT_SUPPORTED;
  const auto aligned = [](const void* p, std::uintptr_t bytes) {
    return p != nullptr && reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
  };
  if (!aligned(map, 64) || !aligned(address, 16) || rank == 0 || rank > 5 ||
      !are_valid(rank, sizes, strides, box, steps)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * 2 > 128) return CUDA_ERROR_INVALID_VALUE;
  // The emulator knows rows of 128 bytes of matrices in 16 bits alone.
  const bool is_16_bit =
      type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (!is_16_bit || rank != 3 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      swizzle != CU_TENSOR_MAP_SWIZZLE_128B || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      box[0] != 64 || box[2] != 1 || steps[0] * steps[1] * steps[2] != 1) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const TensorMap encoded = TiledMap{.base = static_cast<const char*>(address),
                                     .cols = sizes[0],
                                     .rows = sizes[1],
                                     .batch = sizes[2],
                                     .row_pitch = strides[0],
                                     .batch_pitch = strides[1],
                                     .tile_rows = box[1]}
                                .encoded();
  static_assert(sizeof encoded == sizeof *map);
  std::memcpy(map, &encoded, sizeof encoded);
  return CUDA_SUCCESS;
}

}  // extern "C"
