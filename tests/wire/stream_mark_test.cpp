#include "dmuon/wire/stream_mark.h"

#include <gtest/gtest.h>

#include "tests/wire/fake_device.h"

namespace dmuon::wire {
namespace {

using Log = std::vector<std::string>;

TEST(StreamMark, MakesAnotherStreamWaitAndItsOwnNot) {
  const c10::Device device = fake_device();
  StreamMark mark;
  mark.wait();
  EXPECT_EQ(FakeDevice::logged(), Log{}) << "before it was set";
  FakeDevice::current = 1;
  mark.set(device);
  EXPECT_EQ(FakeDevice::logged(), Log{"record 10 on stream 1"});
  mark.wait();
  EXPECT_EQ(FakeDevice::logged(), Log{});
  FakeDevice::current = 2;
  mark.wait();
  EXPECT_EQ(FakeDevice::logged(), Log{"wait for 10 on stream 2"});
}

// So whoever waits for the mark waits for all the streams on which it was set.
TEST(StreamMark, MovesToAStreamThatThenComesAfterIt) {
  const c10::Device device = fake_device();
  StreamMark mark;
  mark.set(device);
  FakeDevice::current = 1;
  mark.set(device);
  EXPECT_EQ(FakeDevice::logged(),
            (Log{"record 10 on stream 0", "wait for 10 on stream 1", "record 20 on stream 1"}));
  FakeDevice::current = 0;
  mark.wait();
  EXPECT_EQ(FakeDevice::logged(), Log{"wait for 20 on stream 0"});
}

TEST(StreamMark, IsNothingOnACpu) {
  fake_device();
  StreamMark mark;
  mark.set(c10::kCPU);
  mark.wait();
  EXPECT_EQ(FakeDevice::logged(), Log{});
}

}  // namespace
}  // namespace dmuon::wire
