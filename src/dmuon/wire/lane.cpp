#include "dmuon/wire/lane.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
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
#include "dmuon/wire/stream_mark.h"

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
    state_->event->block(current_stream(state_->event->device()));
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

// Runs the rests of operations that have begun, in order, and tells that they have happened. The
// thread that begins operations adds them here. Without messages there are no rests, and no thread.
class Lane::Ends {
 public:
  struct Begun {
    Rest rest;
    std::exception_ptr error;  // of its begin
    std::shared_ptr<Event::State> done;
  };

  Ends(const std::string& name, Purpose purpose) : purpose_(purpose) {
    if (purpose == Purpose::kMessages) service_.start(name + " end", [this] { run(); });
  }
  ~Ends() {
    // In a forked child. gloo's buffers would wait for threads that the child does not have.
    if (purpose_ == Purpose::kMessages && !service_.runs())
      static_cast<void>(std::make_unique<std::deque<Begun>>(std::move(open_)).release());
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  // Why nothing may begin any more; null if anything may.
  std::exception_ptr failure() {
    const auto lock = service_.lock();
    return failure_;
  }

  // Without a rest, and with nothing open before it, the operation ends in the thread that adds.
  void add(Begun begun) {
    {
      const auto lock = service_.lock();
      if (service_.runs() && (begun.rest || num_open_ > 0)) {
        ++num_open_;
        open_.push_back(std::move(begun));
        service_.changed().notify_all();
        return;
      }
    }
    end(std::move(begun));
  }

 private:
  void run() {
    const PlainMode plain;
    while (true) {
      auto lock = service_.lock();
      service_.changed().wait(lock, [this] { return service_.ends() || !open_.empty(); });
      if (open_.empty()) return;
      Begun begun = std::move(open_.front());
      open_.pop_front();
      lock.unlock();
      end(std::move(begun));
      lock.lock();
      --num_open_;
    }
  }

  void end(Begun begun) {
    // An earlier operation may have failed after this one began.
    std::exception_ptr error = failure();
    if (!error) error = begun.error;
    if (!error && begun.rest) {
      try {
        begun.rest();
      } catch (...) {
        error = std::current_exception();
      }
    }
    begun.rest = nullptr;  // its captures end before a waiter goes on, and its messages too
    if (error && purpose_ == Purpose::kMessages) {
      const auto lock = service_.lock();
      failure_ = error;
    }
    begun.done->happen(error);
  }

  Purpose purpose_;
  std::deque<Begun> open_;
  int num_open_ = 0;  // of these, and the one that ends now
  std::exception_ptr failure_;
  core::ServiceThread service_;  // last: it uses all of the above
};

thread_local bool in_thread_of_lane = false;
thread_local bool issues_compute = false;

class Lane::Worker {
 public:
  Worker(const std::string& name, Purpose purpose) : ends_(name, purpose), purpose_(purpose) {
    service_.start(name, [this] { run(); });
  }

  void enqueue(Work operation, std::vector<Event> after, std::shared_ptr<Event::State> done) {
    {
      const auto lock = service_.lock();
      jobs_.push_back({std::move(operation), std::move(after), std::move(done)});
    }
    service_.changed().notify_all();
  }

 private:
  struct Job {
    Work operation;
    std::vector<Event> after;
    std::shared_ptr<Event::State> done;
  };

  void run() {
    in_thread_of_lane = true;
    const PlainMode plain;
    std::exception_ptr failure;  // of an operation that could not begin
    while (true) {
      auto lock = service_.lock();
      service_.changed().wait(lock, [this] { return service_.ends() || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Ends::Begun begun;
      {
        const Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        begun.done = job.done;
        begun.error = failure ? failure : ends_.failure();
        if (!begun.error) begin(job, &begun);
      }  // the job's captures end before a waiter goes on
      if (purpose_ == Purpose::kMessages) failure = begun.error;
      ends_.add(std::move(begun));
    }
  }

  static void begin(const Job& job, Ends::Begun* begun) {
    try {
      for (const Event& event : job.after) event.wait();
      begun->rest = job.operation.begin();
    } catch (...) {
      begun->error = std::current_exception();
    }
  }

  Ends ends_;
  std::deque<Job> jobs_;
  Purpose purpose_;
  core::ServiceThread service_;  // last: it uses all of the above
};

// Issues each operation to the lane's stream, which first waits for the current stream.
class Lane::Stream {
 public:
  Stream(c10::Device device, Purpose purpose)
      : purpose_(purpose),
        stream_(c10::impl::VirtualGuardImpl(device.type())
                    .getStreamFromGlobalPool(device, purpose == Purpose::kMessages)) {}

  void enqueue(const Work& operation, const std::vector<Event>& after, Event::State& done) {
    const c10::Device device = stream_.device();
    const c10::Stream current = current_stream(device);
    order(current, stream_);
    done.event.emplace(device.type());
    const PlainMode plain;
    const c10::StreamGuard on_lane(stream_);
    const bool issued = std::exchange(issues_compute, purpose_ == Purpose::kCompute);
    try {
      if (error_) std::rethrow_exception(error_);
      for (const Event& event : after) event.wait();
      if (const Rest rest = operation.begin()) rest();
      done.event->record(stream_);
    } catch (...) {
      done.event.reset();
      done.happen(std::current_exception());
      if (purpose_ == Purpose::kMessages) error_ = std::current_exception();
      // Nobody waits for its event, and memory that its kernels use may be freed later.
      if (purpose_ == Purpose::kCompute) order_quietly(stream_, current);
    }
    issues_compute = issued;
  }

  static void order_quietly(const c10::Stream& first, const c10::Stream& second) try {
    order(first, second);
  } catch (const std::exception&) {  // the device has failed, and runs nothing more
  }

  bool ends_before(std::chrono::steady_clock::time_point end) {
    c10::Event last(stream_.device_type());
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
  c10::Stream stream_;
};

bool Lane::is_in_thread() { return in_thread_of_lane; }
bool Lane::is_in_operation() { return in_thread_of_lane || issues_compute; }

bool Lane::ends_within(std::chrono::milliseconds most) {
  const auto end = std::chrono::steady_clock::now() + most;
  if (stream_ && !stream_->ends_before(end)) return false;
  return !worker_ || enqueue(c10::kCPU, [] {}, {}).wait_for(most);
}

double Lane::claim(double started, double done) {
  const std::scoped_lock lock(mutex_);
  // An operation may have begun while others travelled: the lane was theirs.
  const double since = std::max(started, free_since_);
  free_since_ = std::max(done, free_since_);
  return std::min(since, done);
}

Lane::Lane(std::string name, Purpose purpose) : name_(std::move(name)), purpose_(purpose) {}
Lane::~Lane() = default;

Event Lane::enqueue(c10::Device device, Work operation, std::vector<Event> after) {
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
