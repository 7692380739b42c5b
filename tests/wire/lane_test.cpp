#include "dmuon/wire/lane.h"

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/core/forked_child.h"

namespace dmuon::wire {
namespace {

/// Holds an operation until it is opened.
class Gate {
 public:
  void open() {
    {
      const std::scoped_lock lock(mutex_);
      is_open_ = true;
    }
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

TEST(Lane, ReturnsAtOnceAndRunsInOrder) {
  Lane lane("test");
  Gate gate;
  std::vector<int> order;
  lane.enqueue(c10::kCPU, [&] { gate.pass(); }, {});
  Event last;
  for (int i = 0; i < 20; ++i) {
    last = lane.enqueue(c10::kCPU, [&order, i] { order.push_back(i); }, {});
  }
  EXPECT_TRUE(order.empty());  // nothing has run, and this thread is here
  gate.open();
  last.wait();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(order.at(static_cast<std::size_t>(i)), i);
}

TEST(Lane, WaitsForAnotherLanesEvents) {
  Lane first("first");
  Lane second("second");
  Gate gate;
  std::atomic<bool> happened = false;
  const Event event = first.enqueue(c10::kCPU,
                                    [&] {
                                      gate.pass();
                                      happened = true;
                                    },
                                    {});
  bool seen = false;
  const Event after = second.enqueue(c10::kCPU, [&] { seen = happened; }, {event, Event()});
  gate.open();
  after.wait();
  EXPECT_TRUE(seen);
}

TEST(Lane, RunsBesideTheOthers) {
  Lane first("first");
  Lane second("second");
  Gate gate;
  const Event held = first.enqueue(c10::kCPU, [&] { gate.pass(); }, {});
  second.enqueue(c10::kCPU, [] {}, {}).wait();
  gate.open();
  held.wait();
}

TEST(Lane, FailsEverythingAfterAFailure) {
  Lane lane("test");
  const Event before = lane.enqueue(c10::kCPU, [] {}, {});
  const Event failed = lane.enqueue(c10::kCPU, [] { throw std::runtime_error("a peer died"); }, {});
  bool ran = false;
  const Event after = lane.enqueue(c10::kCPU, [&] { ran = true; }, {});
  EXPECT_NO_THROW(before.wait());
  for (const Event& event : {failed, after, failed}) {
    try {
      event.wait();
      ADD_FAILURE() << "expected the error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "a peer died");
    }
  }
  EXPECT_FALSE(ran);
}

TEST(Lane, FailsWhatDependsOnAFailure) {
  Lane first("first");
  Lane second("second");
  const Event failed =
      first.enqueue(c10::kCPU, [] { throw std::runtime_error("a peer died"); }, {});
  bool ran = false;
  EXPECT_THROW(second.enqueue(c10::kCPU, [&] { ran = true; }, {failed}).wait(), std::runtime_error);
  EXPECT_FALSE(ran);
}

TEST(Lane, TakesNoGradients) {
  Lane lane("test");
  bool enabled = true;
  lane.enqueue(c10::kCPU, [&] { enabled = c10::GradMode::is_enabled(); }, {}).wait();
  EXPECT_FALSE(enabled);
}

TEST(Lane, FinishesWhatIsEnqueuedBeforeItGoes) {
  int runs = 0;
  {
    Lane lane("test");
    for (int i = 0; i < 100; ++i) lane.enqueue(c10::kCPU, [&] { ++runs; }, {});
  }
  EXPECT_EQ(runs, 100);
}

// Else one direction of a link idles while a message of the other one still travels.
TEST(Lane, BeginsTheNextOperationWhileMessagesTravel) {
  Lane lane("test");
  Gate begun;
  Gate arrived;
  std::vector<int> ends;
  const Event first = lane.enqueue(c10::kCPU,
                                   [&] {
                                     return Rest([&] {
                                       arrived.pass();
                                       ends.push_back(1);
                                     });
                                   },
                                   {});
  const Event second = lane.enqueue(c10::kCPU,
                                    [&] {
                                      begun.open();
                                      return Rest([&] { ends.push_back(2); });
                                    },
                                    {});
  const Event third = lane.enqueue(c10::kCPU, [] {}, {});
  begun.pass();
  for (const Event& event : {first, second, third}) EXPECT_FALSE(event.has_happened());
  arrived.open();
  third.wait();
  EXPECT_TRUE(first.has_happened() && second.has_happened());
  EXPECT_EQ(ends, (std::vector<int>{1, 2}));
}

TEST(Lane, IsBusyWithOneOperationAtATime) {
  Lane lane("test");
  Lane other("other");
  EXPECT_EQ(lane.claim(1, 4), 1);
  EXPECT_EQ(lane.claim(2, 6), 4);  // began while the first one travelled
  EXPECT_EQ(lane.claim(3, 5), 5);  // done before that one, which has been counted
  EXPECT_EQ(lane.claim(7, 8), 7);
  EXPECT_EQ(other.claim(2, 3), 2);
}

TEST(Lane, EndsNothingAfterMessagesThatFailed) {
  Lane lane("test");
  Gate begun;
  auto buffer = std::make_shared<int>();
  bool ran = false;
  lane.enqueue(c10::kCPU,
               [&] {
                 return Rest([&] {
                   begun.pass();
                   throw std::runtime_error("a peer died");
                 });
               },
               {});
  const Event in_flight = lane.enqueue(c10::kCPU,
                                       [&] {
                                         begun.open();
                                         return Rest([&ran, buffer] { ran = *buffer == 0; });
                                       },
                                       {});
  EXPECT_THROW(in_flight.wait(), std::runtime_error);
  EXPECT_EQ(buffer.use_count(), 1);  // nothing receives into it any more
  EXPECT_THROW(lane.enqueue(c10::kCPU, [&] { ran = true; }, {}).wait(), std::runtime_error);
  EXPECT_FALSE(ran);
}

// The peers of those before it wait for their sums.
TEST(Lane, EndsWhatBeganBeforeAnOperationThatCannotBegin) {
  Lane lane("test");
  Gate failed;
  const Event before = lane.enqueue(c10::kCPU, [&] { return Rest([&] { failed.pass(); }); }, {});
  const Event fails = lane.enqueue(c10::kCPU,
                                   [&] {
                                     failed.open();
                                     throw std::runtime_error("no memory");
                                   },
                                   {});
  EXPECT_NO_THROW(before.wait());
  EXPECT_THROW(fails.wait(), std::runtime_error);
}

TEST(Event, SaysWhetherItHasHappenedInTime) {
  Lane lane("test");
  Gate gate;
  const Event event = lane.enqueue(c10::kCPU, [&] { gate.pass(); }, {});
  EXPECT_FALSE(event.wait_for(std::chrono::milliseconds(1)));
  gate.open();
  EXPECT_TRUE(event.wait_for(std::chrono::milliseconds(60000)));
}

TEST(Event, HasHappenedByDefault) { EXPECT_NO_THROW(Event().wait()); }

// An update that ran out of memory may be tried again; a group out of step may not.
TEST(Lane, GoesOnAfterAFailureIfItCarriesNoMessages) {
  for (const Lane::Purpose purpose : {Lane::Purpose::kCompute, Lane::Purpose::kMessages}) {
    Lane lane("lane", purpose);
    const Event failed = lane.enqueue(c10::kCPU, [] { throw std::domain_error("no memory"); }, {});
    const Event next = lane.enqueue(c10::kCPU, [] {}, {});
    const Event depends = lane.enqueue(c10::kCPU, [] {}, {failed});
    EXPECT_THROW(failed.wait(), std::domain_error);
    EXPECT_THROW(depends.wait(), std::domain_error);
    if (purpose == Lane::Purpose::kCompute) {
      EXPECT_NO_THROW(next.wait());
      EXPECT_NO_THROW(lane.enqueue(c10::kCPU, [] {}, {}).wait());
    } else {
      EXPECT_THROW(next.wait(), std::domain_error);
    }
  }
}

// A data loader's worker, say, that frees its copy of the model.
TEST(Lane, MayBeFreedByAForkedChild) {
  auto lane = std::make_unique<Lane>("lane");
  lane->enqueue(c10::kCPU, [] {}, {}).wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // its thread waits
  EXPECT_TRUE(core::ends_in_a_child([&] { lane.reset(); }));
}

// What is under way waits for threads that the child does not have.
TEST(Lane, LeavesWhatIsUnderWayToTheParent) {
  auto lane = std::make_unique<Lane>("lane");
  Gate arrived;
  Gate begun;
  // Ends at once in the parent, never in the child.
  const std::shared_ptr<void> buffer(nullptr, [parent = getpid()](void*) {
    while (getpid() != parent) std::this_thread::sleep_for(std::chrono::seconds(1));
  });
  lane->enqueue(c10::kCPU, [&] { return Rest([&] { arrived.pass(); }); }, {});
  lane->enqueue(c10::kCPU,
                [&] {
                  begun.open();
                  return Rest([buffer] {});
                },
                {});
  lane->enqueue(c10::kCPU, [] {}, {});
  begun.pass();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // its threads wait
  EXPECT_TRUE(core::ends_in_a_child([&] { lane.reset(); }));
  arrived.open();
}

TEST(Lane, EndsWhatIsUnderWayBeforeItGoes) {
  int ends = 0;
  {
    Lane lane("test");
    for (int i = 0; i < 100; ++i)
      lane.enqueue(c10::kCPU, [&] { return Rest([&] { ++ends; }); }, {});
    EXPECT_TRUE(lane.ends_within(std::chrono::minutes(1)));
    EXPECT_EQ(ends, 100);
    lane.enqueue(c10::kCPU, [&] { return Rest([&] { ++ends; }); }, {});
  }
  EXPECT_EQ(ends, 101);
}

}  // namespace
}  // namespace dmuon::wire
