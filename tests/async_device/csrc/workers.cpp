#include "async_device/csrc/workers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <thread>
#include <utility>

namespace async_device {

void Workers::run(std::function<void()> work) {
  const std::scoped_lock lock(mutex_);
  waiting_.push_back(std::move(work));
  if (num_idle_ >= waiting_.size()) {
    wakes_.notify_one();
  } else {
    std::thread([this] { serve(); }).detach();
  }
}

void Workers::serve() {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const c10::AutoGradMode no_gradients(false);
  std::unique_lock lock(mutex_);
  while (true) {
    while (waiting_.empty()) {
      ++num_idle_;
      wakes_.wait(lock);
      --num_idle_;
    }
    auto work = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it holds may call back
    lock.lock();
  }
}

}  // namespace async_device
