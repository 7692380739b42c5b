#pragma once

#include <string>

namespace dmuon::kernels::cuda {

// The functions of the CUDA driver that dmuon calls, in declarations of its own: no CUDA header is
// needed to build, and no library to link. tests/kernels/cuda/abi_test.cpp compares each
// declaration with NVIDIA's cuda.h.

using Result = int;  ///< CUresult; 0 is success
inline constexpr Result kInvalidContext = 201;
using Device = int;
using Context = struct ContextTag*;
using Library = struct LibraryTag*;
using Kernel = struct KernelTag*;  ///< cuLaunchKernelEx takes one in place of a CUfunction
using Stream = void*;              ///< CUstream, which is a cudaStream_t

enum DeviceAttribute { kMultiprocessors = 16, kMajor = 75, kMinor = 76 };
enum KernelAttribute { kMostSharedBytes = 8 };
// The values of a tensor map.
enum TensorType { kTensorFp16 = 6, kTensorBFloat16 = 9 };
enum Interleave { kNoInterleave = 0 };
enum Swizzle { kSwizzle128 = 3 };
enum Promotion { kPromote256 = 3 };  ///< what L2 reads at once, in bytes
enum Fill { kFillZeros = 0 };        ///< for entries beyond the tensor

enum CaptureMode { kThreadLocalCapture = 1 };
enum LaunchAttributeId { kProgrammaticSerialization = 6 };

struct LaunchAttribute {  ///< CUlaunchAttribute
  int id = 0;
  int padding = 0;
  union {
    int allowed;
    char bytes[64];
  } value{};
};

struct LaunchConfiguration {  ///< CUlaunchConfig
  unsigned grid_x = 1;
  unsigned grid_y = 1;
  unsigned grid_z = 1;
  unsigned block_x = 1;
  unsigned block_y = 1;
  unsigned block_z = 1;
  unsigned shared_bytes = 0;
  Stream stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  unsigned num_attributes = 0;
};

struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*device_attribute)(int* value, int attribute, Device device);
  Result (*retain_primary)(Context* context, Device device);
  Result (*current_context)(Context* context);
  Result (*set_current_context)(Context context);
  Result (*load_library)(Library* library, const void* image, void* options, void** option_values,
                         unsigned num_options, void* library_options, void** library_option_values,
                         unsigned num_library_options);
  Result (*get_kernel)(Kernel* kernel, Library library, const char* name);
  Result (*launch)(const LaunchConfiguration* configuration, Kernel kernel, void** parameters,
                   void** extra);
  Result (*set_kernel_attribute)(int attribute, int value, Kernel kernel, Device device);
  Result (*encode_tensor_map)(void* map, int type, unsigned rank, void* data,
                              const unsigned long* sizes, const unsigned long* byte_strides,
                              const unsigned* box, const unsigned* element_strides, int interleave,
                              int swizzle, int promotion, int fill);
  Result (*is_capturing)(Stream stream, int* status);  ///< 0: no
  Result (*begin_capture)(Stream stream, int mode);
  Result (*end_capture)(Stream stream, void** graph);
  Result (*instantiate)(void** executable, void* graph, unsigned long long flags);
  Result (*launch_graph)(void* executable, Stream stream);
  Result (*destroy_executable)(void* executable);
  Result (*destroy_graph)(void* graph);
  Result (*error_name)(Result result, const char** name);
};

/// Opens libcuda.so.1 in the first call and never closes it: the library that PyTorch has opened,
/// if it has. Returns null if there is no driver of CUDA 12.0 or later, or if it does not start;
/// see `why_no_driver`. Thread-safe.
const Driver* driver();

/// Returns one sentence if driver() is null.
const std::string& why_no_driver();

/// Returns the driver's name of a result, such as CUDA_ERROR_INVALID_VALUE. driver() is not null.
std::string name_of(Result result);

}  // namespace dmuon::kernels::cuda
