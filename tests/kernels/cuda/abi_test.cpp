// dmuon's declarations of the driver against NVIDIA's.
#include <cuda.h>
#include <gtest/gtest.h>

#include <string_view>
#include <type_traits>

#include "dmuon/kernels/cuda/driver.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda {
namespace {

static_assert(sizeof(CUresult) == sizeof(Result) && CUDA_SUCCESS == 0);
static_assert(kInvalidContext == static_cast<int>(CUDA_ERROR_INVALID_CONTEXT));
static_assert(sizeof(CUdevice) == sizeof(Device) && sizeof(CUstream) == sizeof(Stream));
static_assert(kMultiprocessors == static_cast<int>(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
static_assert(kMajor == static_cast<int>(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
static_assert(kMinor == static_cast<int>(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));

static_assert(kMostSharedBytes ==
              static_cast<int>(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES));
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
static_assert(kTensorFp16 == static_cast<int>(CU_TENSOR_MAP_DATA_TYPE_FLOAT16));
static_assert(kTensorBFloat16 == static_cast<int>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16));
static_assert(kNoInterleave == static_cast<int>(CU_TENSOR_MAP_INTERLEAVE_NONE));
static_assert(kSwizzle128 == static_cast<int>(CU_TENSOR_MAP_SWIZZLE_128B));
static_assert(kPromote256 == static_cast<int>(CU_TENSOR_MAP_L2_PROMOTION_L2_256B));
static_assert(kFillZeros == static_cast<int>(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));

static_assert(kThreadLocalCapture == static_cast<int>(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
static_assert(kProgrammaticSerialization ==
              static_cast<int>(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION));
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(LaunchConfiguration) == sizeof(CUlaunchConfig));
static_assert(offsetof(LaunchConfiguration, shared_bytes) ==
              offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfiguration, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfiguration, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfiguration, num_attributes) == offsetof(CUlaunchConfig, numAttrs));

// Arguments pass alike: both pointers, or neither, and of one size.
template <typename Ours, typename Theirs>
constexpr bool kPassAlike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;

template <typename... Ours, typename... Theirs>
constexpr bool same_arguments(Result (*)(Ours...), CUresult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return (kPassAlike<Ours, Theirs> && ...);
  } else {
    return false;
  }
}

#define EXPANDED_NAME(x) QUOTED(x)
#define QUOTED(x) #x
// The member's arguments, and the name that cuda.h's macro gives the function.
#define DRIVER_HAS(member, function, name)                                                 \
  static_assert(same_arguments(decltype(Driver::member){}, decltype(&function){}), #name); \
  static_assert(std::string_view(EXPANDED_NAME(function)) == name)

DRIVER_HAS(init, cuInit, "cuInit");
DRIVER_HAS(driver_version, cuDriverGetVersion, "cuDriverGetVersion");
DRIVER_HAS(device_attribute, cuDeviceGetAttribute, "cuDeviceGetAttribute");
DRIVER_HAS(retain_primary, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
DRIVER_HAS(current_context, cuCtxGetCurrent, "cuCtxGetCurrent");
DRIVER_HAS(set_current_context, cuCtxSetCurrent, "cuCtxSetCurrent");
DRIVER_HAS(load_library, cuLibraryLoadData, "cuLibraryLoadData");
DRIVER_HAS(get_kernel, cuLibraryGetKernel, "cuLibraryGetKernel");
DRIVER_HAS(launch, cuLaunchKernelEx, "cuLaunchKernelEx");
DRIVER_HAS(set_kernel_attribute, cuKernelSetAttribute, "cuKernelSetAttribute");
DRIVER_HAS(encode_tensor_map, cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
DRIVER_HAS(is_capturing, cuStreamIsCapturing, "cuStreamIsCapturing");
DRIVER_HAS(begin_capture, cuStreamBeginCapture, "cuStreamBeginCapture_v2");
DRIVER_HAS(end_capture, cuStreamEndCapture, "cuStreamEndCapture");
DRIVER_HAS(instantiate, cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags");
DRIVER_HAS(launch_graph, cuGraphLaunch, "cuGraphLaunch");
DRIVER_HAS(destroy_executable, cuGraphExecDestroy, "cuGraphExecDestroy");
DRIVER_HAS(destroy_graph, cuGraphDestroy, "cuGraphDestroy");
DRIVER_HAS(error_name, cuGetErrorName, "cuGetErrorName");

TEST(Abi, NamesErrorsAsTheDriverDoes) {
  ASSERT_NE(driver(), nullptr) << why_no_driver();
  EXPECT_EQ(name_of(CUDA_ERROR_ILLEGAL_ADDRESS), "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
  EXPECT_EQ(name_of(1000), "unknown error (1000)");
}

}  // namespace
}  // namespace dmuon::kernels::cuda
