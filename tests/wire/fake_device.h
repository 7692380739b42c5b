#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <string>
#include <utility>
#include <vector>

namespace dmuon::wire {

/// A device with streams that runs nothing: it logs what its events are used for. An event is a
/// number; the time at which it happens is its number in milliseconds, 10 ms apart.
struct FakeDevice final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kType = c10::DeviceType::IDEEP;
  static inline const c10::Device kDevice{kType, 0};
  static inline std::vector<std::string> log;
  static inline c10::StreamId current = 0;
  static inline std::intptr_t last_event = 0;

  /// Empties the log.
  static std::vector<std::string> logged() { return std::exchange(log, {}); }

  static void add(const std::string& does, const void* event, c10::StreamId stream) {
    log.push_back(does + " " + std::to_string(reinterpret_cast<std::intptr_t>(event)) +
                  " on stream " + std::to_string(stream));
  }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, std::exchange(current, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    last_event += 10;
    *event = reinterpret_cast<void*>(last_event);  // NOLINT(performance-no-int-to-ptr)
    add("record", *event, stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    add("wait for", event, stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { add("host waits for", event, current); }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return static_cast<double>(reinterpret_cast<std::intptr_t>(end) -
                               reinterpret_cast<std::intptr_t>(begin));
  }
};

/// Registers the device, once a process.
inline c10::Device fake_device() {
  static const c10::impl::DeviceGuardImplRegistrar registered(FakeDevice::kType, new FakeDevice);
  FakeDevice::log.clear();
  FakeDevice::current = 0;
  FakeDevice::last_event = 0;
  return FakeDevice::kDevice;
}

}  // namespace dmuon::wire
