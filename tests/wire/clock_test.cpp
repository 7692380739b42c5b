#include "dmuon/wire/clock.h"

#include <c10/core/Event.h>
#include <gtest/gtest.h>

#include "tests/wire/fake_device.h"

namespace dmuon::wire {
namespace {

using Log = std::vector<std::string>;

TEST(Clock, IsTheHostsOnACpu) {
  fake_device();
  Clock clock(c10::kCPU);
  for (const bool started : {false, true}) {
    if (started) clock.start();
    const double before = Clock::host_now();
    const Instant instant = clock.now();
    const double after = Clock::host_now();
    EXPECT_EQ(instant.event, nullptr);
    EXPECT_EQ(clock.seconds(instant), instant.host);
    EXPECT_LE(before, instant.host);
    EXPECT_LE(instant.host, after);
  }
  EXPECT_GT(Clock::host_now(), 1.7e9) << "since 1970";
  EXPECT_EQ(FakeDevice::logged(), Log{});
}

TEST(Clock, IsTheDevicesBetweenStartAndStop) {
  Clock clock(fake_device());
  EXPECT_EQ(clock.now().event, nullptr) << "before it starts";
  EXPECT_EQ(FakeDevice::logged(), Log{});
  const double before = Clock::host_now();
  clock.start();
  const double after = Clock::host_now();
  EXPECT_EQ(FakeDevice::logged(), (Log{"record 10 on stream 0", "host waits for 10 on stream 0"}));
  FakeDevice::current = 3;
  const Instant first = clock.now();
  const Instant second = clock.now();
  EXPECT_EQ(FakeDevice::logged(), (Log{"record 20 on stream 3", "record 30 on stream 3"}));
  clock.stop();
  EXPECT_EQ(clock.now().event, nullptr) << "after it has stopped";
  // Events are 10 ms apart. The start lies at the host's time when the device had come to it.
  EXPECT_GE(clock.seconds(first), before + 0.010);
  EXPECT_LE(clock.seconds(first), after + 0.010);
  EXPECT_EQ(FakeDevice::logged()[0], "host waits for 20 on stream 3");
  EXPECT_NEAR(clock.seconds(second) - clock.seconds(first), 0.010, 1e-6);
}

}  // namespace
}  // namespace dmuon::wire
