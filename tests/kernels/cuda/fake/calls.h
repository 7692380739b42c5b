#pragma once

#include <cuda.h>

#include <mutex>

#include "tests/kernels/cuda/fake/device.h"

// All functions lock the device.
#define DMUON_DEVICE_LOCKED       \
  Device& device = Device::get(); \
  const std::scoped_lock lock(device.mutex)
#define DMUON_RETURN_UNLESS(check) \
  if (const CUresult result = check; result != CUDA_SUCCESS) return result

// What the driver's functions begin with.
namespace dmuon::kernels::cuda::fake {

inline thread_local CUcontext current_context = nullptr;

// What every call that needs a context answers first.
inline CUresult ready(const Device& device) {
  if (!device.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (current_context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return static_cast<CUresult>(device.sticky);
}

// The same for a call that no capture allows: it waits, allocates or loads.
inline CUresult ready_to_wait(Device& device) {
  const CUresult result = ready(device);
  if (result != CUDA_SUCCESS || !device.invalidate_captures()) return result;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

// The same for a copy, which is work without a stream.
inline CUresult ready_to_copy(Device& device) {
  DMUON_RETURN_UNLESS(ready_to_wait(device));
  return device.invalidate_blocking_captures() ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

}  // namespace dmuon::kernels::cuda::fake
