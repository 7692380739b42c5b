#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/fake/cubin.h"
#include "tests/kernels/cuda/fake/fake.h"
#include "tests/kernels/cuda/fake/registry.h"

namespace dmuon::kernels::cuda::fake {

struct Limits {
  int capability;         ///< such as 90
  int shared_bytes;       ///< a block's, without asking for more
  int most_shared_bytes;  ///< a block's, if a kernel asks for them
  int registers;          ///< a block's
  int multiprocessors;
};

/// A kernel of a library, as the device takes it.
struct LoadedKernel {
  std::string name;
  CubinKernel needs;
  const HostKernel* host;
  int shared_bytes;  ///< a block's at most
};

/// A launch with the parameters that it copied.
struct Work {
  const LoadedKernel* kernel;
  std::shared_ptr<const void> parameters;
  emulator::Grid grid;
};

using Task = std::function<void()>;

/// A launch on a device.
struct Launched {
  int device;
  Work work;
};

struct StreamState {
  std::deque<Task> queue;
  bool blocking = false;  ///< work without a stream waits for it
  bool capturing = false;
  bool invalid = false;  ///< what it captures
  std::vector<Launched> captured;
  std::thread::id capturer;
  bool local = false;  ///< the capture forbids its own thread alone what no capture allows
};

/// All devices, which are alike. Work runs in the calls that wait for it. Its functions are called
/// under `mutex`.
class Device {
 public:
  static Device& get();

  std::recursive_mutex mutex;  ///< an executor may ask about captures
  bool initialised = false;
  unsigned seed = 1;
  long only_block = -1;
  int graphs = 0;  ///< graphs and executable ones that have not been destroyed
  FakeCounts counts{};
  std::string errors;
  /// Makes what a handle points to.
  template <typename T>
  T* keep(T value) {
    auto made = std::make_shared<T>(std::move(value));
    kept.push_back(made);
    return made.get();
  }
  int sticky = 0;  ///< a CUresult: the error that a launch left
  std::map<void*, StreamState> streams;
  std::vector<std::shared_ptr<void>>
      kept;  ///< libraries, streams and graphs, which nobody destroys
  std::map<std::uintptr_t, std::size_t> memory;  ///< bytes that were allocated, by address
  FakeExecutor executor = nullptr;
  std::ptrdiff_t to_host = 0;

  const Limits& limits() const { return limits_; }
  int version() const { return version_; }
  /// Spoils the captures that forbid this thread to wait, allocate or load. Returns true if there
  /// are any.
  bool invalidate_captures();
  /// The same for the captures of blocking streams, by any thread, which work without a stream
  /// spoils.
  bool invalidate_blocking_captures();
  /// Adds a launch to a stream or to what it captures, or hands it to the executor. Reports a
  /// launch beside the capture of its own thread, which no event joins to it.
  void launch(int which, void* stream, Work work);
  void synchronise(void* stream);
  void synchronise();

 private:
  Device();
  void run(const Work& work);
  bool owns(const emulator::Buffer& buffer) const;
  void fail(int result, const std::string& what);

  Limits limits_{};
  int version_;
};

}  // namespace dmuon::kernels::cuda::fake
