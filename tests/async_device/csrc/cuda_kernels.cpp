#include "async_device/csrc/cuda_kernels.h"

#include <dlfcn.h>

#include <atomic>
#include <string>
#include <utility>

#include "async_device/csrc/device.h"
#include "async_device/csrc/settings.h"
#include "async_device/csrc/statistics.h"
#include "kernels/cuda/fake/fake.h"

namespace async_device {
namespace {

std::atomic<bool> is_misplaced = false;

template <typename Function>
Function* function_of_the_fake(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) raise("run_cuda_kernels: the fake libcuda.so.1 is not loaded");
  return reinterpret_cast<Function*>(found);
}

Stream* stream_nobody_waits_for(int device) {
  static Stream* streams[Device::kNumDevices] = {};
  Stream*& stream = streams[device];
  if (stream == nullptr) stream = Device::get().take_stream(device);
  return stream;
}

Use use_of(const std::string& kernel, const FakeRegion& region) {
  const auto* base = static_cast<const char*>(region.base);
  const std::string what = kernel + ": '" + region.name + "'";
  Block* block = Device::get().block_at(base);
  if (block == nullptr) raise(what + " is not in the device's memory");
  const auto count = [](size_t number) { return static_cast<int64_t>(number); };
  const Region bytes = make_region(
      {count(region.batch), count(region.rows), count(region.row_bytes)},
      {count(region.batch_pitch), count(region.row_pitch), 1}, base - block->address, 1);
  if (bytes.end() > block->bytes) raise(what + " goes beyond its block of the device's memory");
  return {block, bytes, region.writes != 0};
}

// A FakeExecutor.
void enqueue(int device, void* given, const char* kernel, void (*run)(void*), void* argument,
             const FakeRegion* regions, int num_regions) {
  auto* stream = static_cast<Stream*>(given);
  if (stream->device != device) {
    raise(std::string(kernel) + ": the context is of device " + std::to_string(device) +
          ", the stream of device " + std::to_string(stream->device));
  }
  if (is_misplaced) stream = stream_nobody_waits_for(device);
  Operation operation{interned(kernel),
                      [run, argument] {
                        run(argument);
                        static auto* const errors =
                            function_of_the_fake<decltype(fake_cuda_errors)>("fake_cuda_errors");
                        if (const char* error = errors()) raise(error);
                      },
                      {}};
  for (int i = 0; i < num_regions; ++i) operation.uses.push_back(use_of(kernel, regions[i]));
  Device::get().enqueue(stream, std::move(operation));
  Statistics::get().count_kernel(stream->kind);
}

}  // namespace

void run_cuda_kernels() {
  function_of_the_fake<decltype(fake_cuda_executor)>("fake_cuda_executor")(
      &enqueue, Device::get().host_offset());
  capture_checks = {
      function_of_the_fake<decltype(fake_cuda_is_captured)>("fake_cuda_is_captured"),
      function_of_the_fake<decltype(fake_cuda_forbids)>("fake_cuda_forbids"),
  };
}

void misplace_cuda_kernels(bool misplaced) { is_misplaced = misplaced; }

}  // namespace async_device
