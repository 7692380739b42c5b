#include "dmuon/core/service_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>

#include "tests/core/forked_child.h"

namespace dmuon::core {
namespace {

// Its thread waits until its owner ends, and then works on.
class Service {
 public:
  explicit Service(std::atomic<bool>* finished) : finished_(*finished) {
    service_.start("service", [this] { run(); });
    auto lock = service_.lock();
    service_.changed().wait(lock, [this] { return waits_; });
  }
  bool runs() const { return service_.runs(); }

 private:
  void run() {
    auto lock = service_.lock();
    waits_ = true;
    service_.changed().notify_all();
    service_.changed().wait(lock, [this] { return service_.ends(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    finished_ = true;
  }

  std::atomic<bool>& finished_;
  bool waits_ = false;
  ServiceThread service_;
};

TEST(ServiceThread, IsWaitedForWhenItsOwnerEnds) {
  std::atomic<bool> finished = false;
  {
    const Service service(&finished);
    EXPECT_TRUE(service.runs());
    EXPECT_FALSE(finished);
  }
  EXPECT_TRUE(finished);
}

TEST(ServiceThread, MayNeverStart) { EXPECT_FALSE(ServiceThread().runs()); }

TEST(ServiceThread, DoesNotRunInAForkedChildAndMayEndThere) {
  std::atomic<bool> finished = false;
  std::optional<Service> service(std::in_place, &finished);
  EXPECT_TRUE(ends_in_a_child([&] {
    if (service->runs()) abort();
    service.reset();
  }));
  EXPECT_TRUE(service->runs());
}

}  // namespace
}  // namespace dmuon::core
