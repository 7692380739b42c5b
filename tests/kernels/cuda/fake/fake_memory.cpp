// The driver's functions that tests call beside dmuon: memory, streams, captures.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/kernels/cuda/fake/calls.h"

using namespace dmuon::kernels::cuda::fake;

namespace {

// From so many bytes on only what is touched takes memory.
constexpr std::size_t kReserved = std::size_t{1} << 30;

// The launches with their arguments, which are not looked at again. The memory is.
struct GraphState {
  std::vector<Launched> launches;
};

}  // namespace

extern "C" {

CUresult cuMemAlloc(CUdeviceptr* address, std::size_t bytes) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready_to_wait(device));
  void* block = nullptr;
  if (bytes < kReserved) {
    block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(block, 0xff, bytes);  // NaN
  } else {
    block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  device.memory[reinterpret_cast<std::uintptr_t>(block)] = bytes;
  *address = reinterpret_cast<CUdeviceptr>(block);
  return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr address) {
  DMUON_DEVICE_LOCKED;
  device.synchronise();
  const auto block = device.memory.extract(address);
  if (block.empty()) return CUDA_ERROR_INVALID_VALUE;
  if (block.mapped() < kReserved) {
    std::free(reinterpret_cast<void*>(address));
  } else {
    munmap(reinterpret_cast<void*>(address), block.mapped());
  }
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t bytes) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready_to_copy(device));
  device.synchronise();
  if (bytes > 0) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t bytes) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready_to_copy(device));
  device.synchronise();
  DMUON_RETURN_UNLESS(ready(device));
  if (bytes > 0) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready(device));
  *stream = reinterpret_cast<CUstream>(device.keep(char{}));
  device.streams[*stream].blocking = flags != CU_STREAM_NON_BLOCKING;
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready_to_wait(device));
  device.synchronise(stream);
  return static_cast<CUresult>(device.sticky);
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready(device));
  StreamState& state = device.streams[stream];
  if (stream == nullptr || state.capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  state.capturing = true;
  state.invalid = false;
  state.capturer = std::this_thread::get_id();
  state.local = mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready(device));
  const StreamState& state = device.streams[stream];
  *status = !state.capturing ? CU_STREAM_CAPTURE_STATUS_NONE
            : state.invalid  ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                             : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  DMUON_DEVICE_LOCKED;
  *graph = nullptr;
  StreamState& state = device.streams[stream];
  if (!state.capturing) return CUDA_ERROR_INVALID_VALUE;
  if (state.local && state.capturer != std::this_thread::get_id())
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  state.capturing = false;
  auto captured = std::exchange(state.captured, {});
  DMUON_RETURN_UNLESS(ready(device));
  if (state.invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  *graph = reinterpret_cast<CUgraph>(new GraphState{std::move(captured)});
  ++device.graphs;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready(device));
  *executable =
      reinterpret_cast<CUgraphExec>(new GraphState(*reinterpret_cast<const GraphState*>(graph)));
  ++device.graphs;
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  DMUON_DEVICE_LOCKED;
  delete reinterpret_cast<GraphState*>(graph);
  --device.graphs;
  return CUDA_SUCCESS;
}

// What was launched goes on.
CUresult cuGraphExecDestroy(CUgraphExec executable) {
  return cuGraphDestroy(reinterpret_cast<CUgraph>(executable));
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  DMUON_DEVICE_LOCKED;
  DMUON_RETURN_UNLESS(ready(device));
  if (device.streams[stream].capturing) return CUDA_ERROR_NOT_SUPPORTED;  // a graph in a graph
  for (const auto& [which, work] : reinterpret_cast<const GraphState*>(executable)->launches)
    device.launch(which, stream, work);
  return CUDA_SUCCESS;
}

}  // extern "C"
