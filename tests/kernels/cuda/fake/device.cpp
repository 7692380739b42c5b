#include "tests/kernels/cuda/fake/device.h"

#include <cuda.h>

#include <cstdlib>
#include <utility>

namespace dmuon::kernels::cuda::fake {
namespace {

int from_environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

int most_shared_bytes(int capability) {
  if (capability == 80) return 163 << 10;
  return capability / 10 == 9 || capability / 10 == 10 ? 227 << 10 : 99 << 10;
}

std::vector<FakeRegion> regions_of(const std::vector<emulator::Buffer>& buffers) {
  std::vector<FakeRegion> regions;
  for (const emulator::Buffer& b : buffers) {
    regions.push_back({b.name.c_str(), b.base, b.row_bytes, b.rows, b.row_pitch, b.batch,
                       b.batch_pitch, b.access == emulator::Access::kRead ? 0 : 1});
  }
  return regions;
}

}  // namespace

Device& Device::get() {
  static Device device;
  return device;
}

Device::Device() : version_(from_environment("FAKE_CUDA_VERSION", 13000)) {
  // The same for all: 48 KB of shared memory, 65536 registers; an A100's multiprocessors.
  const int capability = from_environment("FAKE_CUDA_DEVICE", 90);
  limits_ = {capability, 48 << 10, most_shared_bytes(capability), 65536,
             from_environment("FAKE_CUDA_MULTIPROCESSORS", 108)};
}

bool Device::invalidate_captures() {
  bool found = false;
  for (auto& [stream, state] : streams) {
    if (!state.capturing || (state.local && state.capturer != std::this_thread::get_id())) continue;
    state.invalid = found = true;
  }
  return found;
}

bool Device::invalidate_blocking_captures() {
  bool found = false;
  for (auto& [stream, state] : streams) {
    if (state.capturing && state.blocking) state.invalid = found = true;
  }
  return found;
}

void Device::launch(int which, void* stream, Work work) {
  StreamState& state = streams[stream];
  if (state.capturing) return state.captured.push_back({which, std::move(work)});
  for (const auto& [other, of_other] : streams) {
    if (of_other.capturing && of_other.capturer == std::this_thread::get_id()) {
      fail(CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
           work.kernel->name + ": is launched beside the capture of its thread");
    }
  }
  if (executor == nullptr)
    return state.queue.push_back([this, work = std::move(work)] { run(work); });
  const auto buffers = work.kernel->host->buffers(work.parameters.get(), work.grid.y, {});
  const auto regions = regions_of(buffers);
  auto* task = new Task([this, work] {
    const std::scoped_lock lock(mutex);
    run(work);
  });
  executor(
      which, stream, work.kernel->name.c_str(),
      [](void* argument) {
        const std::unique_ptr<Task> own(static_cast<Task*>(argument));
        (*own)();
      },
      task, regions.data(), static_cast<int>(regions.size()));
}

void Device::synchronise(void* stream) {
  StreamState& state = streams[stream];
  while (!state.queue.empty()) {
    const Task task = std::move(state.queue.front());
    state.queue.pop_front();
    task();
  }
}

void Device::synchronise() {
  for (auto& [stream, state] : streams) synchronise(stream);
}

void Device::fail(int result, const std::string& what) {
  errors += what + "\n";
  if (sticky == 0) sticky = result;
}

bool Device::owns(const emulator::Buffer& buffer) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(buffer.base);
  auto block = memory.upper_bound(begin);
  if (block == memory.begin()) return false;
  --block;
  return begin + buffer.span() <= block->first + block->second;
}

void Device::run(const Work& work) {
  if (sticky != 0) return;  // nothing runs in a lost context
  const std::string& name = work.kernel->name;
  const auto buffers = work.kernel->host->buffers(work.parameters.get(), work.grid.y, to_host);
  for (const emulator::Buffer& buffer : buffers) {
    if (executor == nullptr && !owns(buffer)) {
      return fail(CUDA_ERROR_ILLEGAL_ADDRESS,
                  name + ": " + buffer.name + " lies outside the device's memory");
    }
    const bool is_written = buffer.access != emulator::Access::kRead;
    if (buffer.access != emulator::Access::kWrite) counts.bytes_read += buffer.bytes();
    if (is_written) counts.bytes_written += buffer.bytes();
  }
  counts.launches += 1;
  counts.blocks += work.grid.x * work.grid.y;
  emulator::Grid grid = work.grid;
  grid.only = only_block;
  const auto found = emulator::run(
      grid, buffers, [&] { work.kernel->host->block_thread(work.parameters.get()); }, seed,
      to_host);
  for (const std::string& error : found) fail(CUDA_ERROR_LAUNCH_FAILED, name + ": " + error);
}

}  // namespace dmuon::kernels::cuda::fake
