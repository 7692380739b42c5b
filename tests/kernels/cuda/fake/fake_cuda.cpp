// A libcuda.so.1 without a GPU: the driver's functions that dmuon and its tests call, with the
// driver's checks. The fat binary says which kernels there are and what they need. A launch runs
// the kernel's own source, compiled for the host, on host memory. Compiled against NVIDIA's cuda.h,
// while dmuon declares its own: both must agree.
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/kernels/cuda/fake/calls.h"

using namespace dmuon::kernels::cuda::fake;

namespace {

constexpr int kDevices = 8;

// The address of an entry is a device's primary context.
char primary_contexts[kDevices];

CUcontext primary_context(int device) {
  return reinterpret_cast<CUcontext>(&primary_contexts[device]);
}

int device_of(CUcontext context) {
  return static_cast<int>(reinterpret_cast<const char*>(context) - primary_contexts);
}

bool exists(CUdevice device) { return device >= 0 && device < kDevices; }

struct LibraryState {
  std::vector<Cubin> cubins;
  std::vector<std::unique_ptr<LoadedKernel>> kernels;
};

// The cubin of the device's own capability, or of an earlier minor version.
const Cubin* chosen(const LibraryState& library, int capability) {
  const Cubin* best = nullptr;
  for (const Cubin& cubin : library.cubins) {
    if (cubin.architecture / 10 != capability / 10 || cubin.architecture > capability) continue;
    if (best == nullptr || cubin.architecture > best->architecture) best = &cubin;
  }
  return best;
}

CUresult check_launch(const Device& device, const LoadedKernel& kernel, unsigned grid_x,
                      unsigned grid_y, unsigned threads, unsigned shared_bytes) {
  if (grid_x % static_cast<unsigned>(kernel.needs.cluster) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (grid_x == 0 || grid_x > 0x7fffffffU || grid_y == 0 || grid_y > 65535) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (threads == 0 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  if (shared_bytes > static_cast<unsigned>(kernel.shared_bytes)) return CUDA_ERROR_INVALID_VALUE;
  const int warps = (static_cast<int>(threads) + 31) / 32;
  const int registers_a_warp = (kernel.needs.registers * 32 + 255) / 256 * 256;
  if (static_cast<int>(threads) > kernel.needs.max_threads ||
      warps * registers_a_warp > device.limits().registers) {
    return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  }
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void fake_cuda_seed(unsigned seed) { Device::get().seed = seed; }

void fake_cuda_only_block(long block) { Device::get().only_block = block; }

FakeCounts fake_cuda_counts() {
  DMUON_DEVICE_LOCKED;
  return std::exchange(device.counts, {});
}

const char* fake_cuda_errors() {
  DMUON_DEVICE_LOCKED;
  static std::string told;
  told = std::exchange(device.errors, "");
  device.sticky = 0;
  return told.empty() ? nullptr : told.c_str();
}

int fake_cuda_is_captured(void* stream) {
  DMUON_DEVICE_LOCKED;
  const auto found = device.streams.find(stream);
  return found != device.streams.end() && found->second.capturing ? 1 : 0;
}

int fake_cuda_forbids() {
  DMUON_DEVICE_LOCKED;
  return device.invalidate_captures() ? 1 : 0;
}

int fake_cuda_graphs() {
  DMUON_DEVICE_LOCKED;
  return device.graphs;
}

void fake_cuda_executor(FakeExecutor executor, std::ptrdiff_t to_host) {
  DMUON_DEVICE_LOCKED;
  device.executor = executor;
  device.to_host = to_host;
}

CUresult cuInit(unsigned flags) {
  DMUON_DEVICE_LOCKED;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const char* const result = std::getenv("FAKE_CUDA_INIT");
  device.initialised = result == nullptr;
  return result == nullptr ? CUDA_SUCCESS : static_cast<CUresult>(std::atoi(result));
}

CUresult cuDriverGetVersion(int* version) {
  *version = Device::get().version();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice which) {
  DMUON_DEVICE_LOCKED;
  if (!device.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!exists(which)) return CUDA_ERROR_INVALID_DEVICE;
  const int capability = device.limits().capability;
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) {
    *value = capability / 10;
  } else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) {
    *value = capability % 10;
  } else if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) {
    *value = device.limits().multiprocessors;
  } else {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  static const std::map<CUresult, const char*> kNames{
      {CUDA_SUCCESS, "CUDA_SUCCESS"},
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
      {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
      {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
      {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
      {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
      {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"}};
  const auto found = kNames.find(result);
  *name = found == kNames.end() ? nullptr : found->second;
  return *name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice which) {
  DMUON_DEVICE_LOCKED;
  if (!device.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!exists(which)) return CUDA_ERROR_INVALID_DEVICE;
  *context = primary_context(which);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current_context;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current_context = context;
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  DMUON_DEVICE_LOCKED;
  if (device.invalidate_captures()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  auto cubins = read(code);
  if (cubins.empty()) return CUDA_ERROR_INVALID_IMAGE;
  *library = reinterpret_cast<CUlibrary>(device.keep(LibraryState{std::move(cubins), {}}));
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary handle, const char* name) {
  DMUON_DEVICE_LOCKED;
  auto& library = *reinterpret_cast<LibraryState*>(handle);
  const Cubin* cubin = chosen(library, device.limits().capability);
  if (cubin == nullptr) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const auto needs = cubin->kernels.find(name);
  const auto host = kernels().find(name);
  if (needs == cubin->kernels.end()) return CUDA_ERROR_NOT_FOUND;
  if (host == kernels().end()) {
    std::fprintf(stderr, "fake libcuda: the host has no kernel %s\n", name);
    return CUDA_ERROR_NOT_FOUND;
  }
  // One source: if the sizes differ, a build is stale, or the compilers disagree.
  const auto& bytes = needs->second.parameter_bytes;
  if (bytes != std::vector{static_cast<int>(host->second.parameter_bytes)}) {
    std::fprintf(stderr, "fake libcuda: %s takes other parameters in the cubin\n", name);
    return CUDA_ERROR_INVALID_IMAGE;
  }
  library.kernels.push_back(std::make_unique<LoadedKernel>(
      LoadedKernel{name, needs->second, &host->second, device.limits().shared_bytes}));
  *kernel = reinterpret_cast<CUkernel>(library.kernels.back().get());
  return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle,
                              CUdevice which) {
  DMUON_DEVICE_LOCKED;
  if (!exists(which)) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
      value > device.limits().most_shared_bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  reinterpret_cast<LoadedKernel*>(handle)->shared_bytes = value;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready(device));
  if (config == nullptr || function == nullptr || parameters == nullptr || extra != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const unsigned grid_x = config->gridDimX;
  const unsigned grid_y = config->gridDimY;
  const unsigned block_x = config->blockDimX;
  const unsigned shared_bytes = config->sharedMemBytes;
  const CUstream stream = config->hStream;
  // The emulator has no third dimension.
  if (config->gridDimZ != 1 || config->blockDimY != 1 || config->blockDimZ != 1)
    return CUDA_ERROR_NOT_SUPPORTED;
  bool begins_early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
        device.limits().capability < 90) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    begins_early = attribute.value.programmaticStreamSerializationAllowed != 0;
  }
  const auto* kernel = reinterpret_cast<const LoadedKernel*>(function);
  DMUON_RETURN_UNLESS(check_launch(device, *kernel, grid_x, grid_y, block_x, shared_bytes));
  if (device.streams[stream].capturing && device.streams[stream].invalid)
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  const std::size_t bytes = kernel->host->parameter_bytes;
  const std::shared_ptr<void> copy(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
  std::memcpy(copy.get(), parameters[0], bytes);
  device.launch(device_of(current_context), stream,
                {kernel,
                 copy,
                 {.x = grid_x,
                  .y = grid_y,
                  .threads = block_x,
                  .shared_bytes = shared_bytes,
                  .cluster = static_cast<unsigned>(kernel->needs.cluster),
                  .begins_early = begins_early,
                  .registers = static_cast<unsigned>(kernel->needs.registers)}});
  return CUDA_SUCCESS;
}

}  // extern "C"
