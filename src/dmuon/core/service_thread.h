#pragma once

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace dmuon::core {

/// A thread that serves one object, with the mutex and the condition of what they share.
///
///   service_.start("lane", [this] { run(); });
///   // in run(), until the object ends:
///   ServiceThread::Lock lock = service_.lock();
///   service_.changed().wait(lock, [this] { return service_.ends() || !jobs_.empty(); });
///
/// The destructor tells the thread to end, and waits for it. So the last member of an object is its
/// service. A forked child has no thread: there the destructor waits for nothing. start() and the
/// destructor are the owner's; all else is thread-safe.
class ServiceThread {
 public:
  using Lock = std::unique_lock<std::mutex>;

  ServiceThread() = default;
  ~ServiceThread() {
    if (!thread_.joinable()) return;
    if (!runs()) {
      // A thread of the child may have got its number. Both destructors would wait for it.
      static_cast<void>(std::make_unique<std::thread>(std::move(thread_)).release());
      static_cast<void>(changed_.release());
      return;
    }
    {
      const Lock locked = lock();
      ends_ = true;
    }
    changed_->notify_all();
    thread_.join();
  }
  ServiceThread(const ServiceThread&) = delete;
  ServiceThread& operator=(const ServiceThread&) = delete;

  /// @param name  of the thread; the system keeps 15 characters.
  void start(const std::string& name, std::function<void()> run) {
    thread_ = std::thread(std::move(run));
    pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }

  /// False before start() and in a forked child, where the mutex may be locked for ever.
  bool runs() const { return thread_.joinable() && getpid() == process_; }

  Lock lock() { return Lock(mutex_); }
  std::condition_variable& changed() { return *changed_; }

  /// True if the owner is being destroyed. The caller holds the lock.
  bool ends() const { return ends_; }

 private:
  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  bool ends_ = false;
  pid_t process_ = getpid();
  std::thread thread_;
};

}  // namespace dmuon::core
