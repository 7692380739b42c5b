#pragma once

namespace async_device {

/// Makes launches of the fake CUDA driver (tests/kernels/cuda/fake), which the process has loaded,
/// entries of this device's streams.
/// @throws c10::Error if libcuda.so.1 is not loaded, or not the fake one.
void run_cuda_kernels();

/// Asks the fake driver, if there is one, about captures of its streams: fake.h.
struct CaptureChecks {
  int (*is_captured)(void* stream) = nullptr;
  int (*forbids)() = nullptr;
};
inline CaptureChecks capture_checks;

/// If `misplaced`, later launches go to a stream that nothing else waits for: a planted bug.
void misplace_cuda_kernels(bool misplaced);

}  // namespace async_device
