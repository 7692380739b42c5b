#include "dmuon/wire/lane.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "dmuon/core/service_thread.h"
#include "dmuon/wire/plain_mode.h"

namespace dmuon::wire {

struct Event::State {
  // On a CPU.
  std::mutex mutex;
  std::condition_variable changed;
  bool happened = false;
  std::exception_ptr error;
  // Elsewhere.
  std::optional<c10::Event> event;

  void happen(std::exception_ptr with) {
    {
      const std::scoped_lock lock(mutex);
      happened = true;
      error = std::move(with);
    }
    changed.notify_all();
  }
};

void Event::wait() const {
  if (!state_) return;
  if (state_->event) {
    const c10::impl::VirtualGuardImpl device(state_->event->device_type());
    state_->event->block(device.getStream(state_->event->device()));
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->happened; });
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Event::wait_for(std::chrono::milliseconds most) const {
  if (!state_ || state_->event) return true;
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, most, [this] { return state_->happened; });
}

bool Event::has_happened() const {
  if (!state_) return true;
  if (!state_->event) return wait_for(std::chrono::milliseconds(0));
  try {
    return state_->event->query();
  } catch (const std::exception&) {  // the device has failed
    return true;
  }
}

class Lane::Worker {
 public:
  Worker(const std::string& name, Purpose purpose) : purpose_(purpose) {
    service_.start(name, [this] { run(); });
  }

  void enqueue(std::function<void()> operation, std::vector<Event> after,
               std::shared_ptr<Event::State> done) {
    {
      const auto lock = service_.lock();
      jobs_.push_back({std::move(operation), std::move(after), std::move(done)});
    }
    service_.changed().notify_all();
  }

 private:
  struct Job {
    std::function<void()> operation;
    std::vector<Event> after;
    std::shared_ptr<Event::State> done;
  };

  void run() {
    const PlainMode plain;
    std::exception_ptr error;
    while (true) {
      auto lock = service_.lock();
      service_.changed().wait(lock, [this] { return service_.ends() || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      if (!error) {
        try {
          for (const Event& event : job.after) event.wait();
          job.operation();
        } catch (...) {
          error = std::current_exception();
        }
      }
      job.operation = nullptr;  // its captures end before a waiter goes on
      job.done->happen(error);
      if (purpose_ == Purpose::kCompute) error = nullptr;
    }
  }

  std::deque<Job> jobs_;
  Purpose purpose_;
  core::ServiceThread service_;  // last: it uses all of the above
};

// Issues each operation to the lane's stream, which first waits for the current stream.
class Lane::Stream {
 public:
  Stream(c10::Device device, Purpose purpose)
      : purpose_(purpose),
        guard_(device.type()),
        stream_(guard_.getStreamFromGlobalPool(device, purpose == Purpose::kMessages)) {}

  void enqueue(const std::function<void()>& operation, const std::vector<Event>& after,
               Event::State& done) {
    const c10::Device device = stream_.device();
    c10::Event issued(device.type());
    issued.record(guard_.getStream(device));
    issued.block(stream_);
    done.event.emplace(device.type());
    const PlainMode plain;
    const c10::StreamGuard on_lane(stream_);
    try {
      if (error_) std::rethrow_exception(error_);
      for (const Event& event : after) event.wait();
      operation();
      done.event->record(stream_);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      done.event.reset();
      done.happen(error);
      if (purpose_ == Purpose::kMessages) error_ = error;
    }
  }

  bool ends_before(std::chrono::steady_clock::time_point end) {
    c10::Event last(guard_.type());
    last.record(stream_);
    while (!last.query()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  Purpose purpose_;
  std::exception_ptr error_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
};

bool Lane::ends_within(std::chrono::milliseconds most) {
  const auto end = std::chrono::steady_clock::now() + most;
  if (stream_ && !stream_->ends_before(end)) return false;
  return !worker_ || enqueue(c10::kCPU, [] {}, {}).wait_for(most);
}

Lane::Lane(std::string name, Purpose purpose) : name_(std::move(name)), purpose_(purpose) {}
Lane::~Lane() = default;

Event Lane::enqueue(c10::Device device, std::function<void()> operation, std::vector<Event> after) {
  auto done = std::make_shared<Event::State>();
  if (device.is_cpu()) {
    if (!worker_) worker_ = std::make_unique<Worker>(name_, purpose_);
    worker_->enqueue(std::move(operation), std::move(after), done);
  } else {
    if (!stream_) stream_ = std::make_unique<Stream>(device, purpose_);
    stream_->enqueue(operation, after, *done);
  }
  return Event(std::move(done));
}

}  // namespace dmuon::wire
