#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/library.h"
#include "tests/kernels/cuda/fake/fake.h"

// A device's memory and streams for tests: by libcuda.so.1, the fake or NVIDIA's.
namespace dmuon::kernels::cuda {

template <typename Function>
Function* driver_function(const char* name) {
  static void* const kLibrary = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(kLibrary, name));
}

template <typename... Arguments>
int call(const char* name, Arguments... arguments) {
  auto* const function = driver_function<int(Arguments...)>(name);
  return function == nullptr ? -1 : function(arguments...);
}

/// Of cuStreamCreate. PyTorch's streams are made so too: a copy without a stream spoils the
/// captures of others.
inline constexpr unsigned kNonBlocking = 1;

/// Entries in the device's memory.
template <typename T>
class OnGpu {
 public:
  explicit OnGpu(const std::vector<T>& values) : size_(values.size()) {
    EXPECT_EQ(call("cuMemAlloc_v2", &address_, size_ * sizeof(T) + 16), 0);
    set(values);
  }
  ~OnGpu() { call("cuMemFree_v2", address_); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  T* data() const { return reinterpret_cast<T*>(address_); }
  void set(const std::vector<T>& values) {
    EXPECT_EQ(call("cuMemcpyHtoD_v2", address_, static_cast<const void*>(values.data()),
                   values.size() * sizeof(T)),
              0);
  }
  std::vector<T> values() const {
    std::vector<T> found(size_);
    EXPECT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(found.data()), address_,
                   found.size() * sizeof(T)),
              0);
    return found;
  }

 private:
  std::size_t size_;
  unsigned long long address_ = 0;
};

/// Many entries in the device's memory, few of which are touched: the fake driver only reserves it.
template <typename T>
class Reserved {
 public:
  explicit Reserved(std::int64_t size) {
    if (call("cuMemAlloc_v2", &address_, static_cast<std::size_t>(size) * sizeof(T)) != 0)
      address_ = 0;
  }
  ~Reserved() {
    if (address_ != 0) call("cuMemFree_v2", address_);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

  /// Null if there is no such memory.
  T* data() const { return reinterpret_cast<T*>(address_); }
  void set(std::int64_t at, const std::vector<T>& values) {
    EXPECT_EQ(call("cuMemcpyHtoD_v2", reinterpret_cast<unsigned long long>(data() + at),
                   static_cast<const void*>(values.data()), values.size() * sizeof(T)),
              0);
  }
  std::vector<T> values(std::int64_t at, std::size_t count) const {
    std::vector<T> found(count);
    EXPECT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(found.data()),
                   reinterpret_cast<unsigned long long>(data() + at), count * sizeof(T)),
              0);
    return found;
  }

 private:
  unsigned long long address_ = 0;
};

/// The graph of what a stream has captured. Its maker began the capture; the constructor ends it.
class CapturedGraph {
 public:
  explicit CapturedGraph(void* stream) : stream_(stream) {
    EXPECT_EQ(call("cuStreamEndCapture", stream, &graph_), 0);
    EXPECT_EQ(call("cuGraphInstantiateWithFlags", &executable_, graph_, 0ULL), 0);
  }
  ~CapturedGraph() {
    EXPECT_EQ(call("cuGraphExecDestroy", executable_), 0);
    EXPECT_EQ(call("cuGraphDestroy", graph_), 0);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch() const { ASSERT_EQ(call("cuGraphLaunch", executable_, stream_), 0); }

 private:
  void* stream_;
  void* graph_ = nullptr;
  void* executable_ = nullptr;
};

/// A test on device 0 with a stream.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(unavailable(0), "");
    // The thread's context, as the CUDA runtime would set it.
    void* context = nullptr;
    ASSERT_EQ(call("cuDevicePrimaryCtxRetain", &context, 0), 0);
    ASSERT_EQ(call("cuCtxSetCurrent", context), 0);
    ASSERT_EQ(call("cuStreamCreate", &stream_, kNonBlocking), 0);
  }
  void TearDown() override {
    only_block(-1);
    EXPECT_EQ(found(), "");
  }

  int synchronise() { return call("cuStreamSynchronize", stream_); }
  /// What the emulator has found since the last call; nothing on a GPU.
  static std::string found() {
    auto* const errors = driver_function<const char*()>("fake_cuda_errors");
    const char* text = errors == nullptr ? nullptr : errors();
    return text == nullptr ? "" : text;
  }
  static void seed(unsigned seed) {
    auto* const function = driver_function<void(unsigned)>("fake_cuda_seed");
    if (function != nullptr) function(seed);
  }

  /// Runs this block alone, on the fake driver; see fake.h.
  static void only_block(long block) {
    auto* const function = driver_function<void(long)>("fake_cuda_only_block");
    if (function != nullptr) function(block);
  }

  void* stream_ = nullptr;
};

}  // namespace dmuon::kernels::cuda
