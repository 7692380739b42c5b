#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace async_device {

/// Threads for communication, as many as run at once; they are never ended. A thread whose call was
/// aborted ends with that call, if it ever returns.
class Workers {
 public:
  /// Runs `work` in a thread at once; it must not throw.
  void run(std::function<void()> work);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable wakes_;
  std::deque<std::function<void()>> waiting_;
  size_t num_idle_ = 0;
};

}  // namespace async_device
