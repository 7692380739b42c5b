// What PyTorch asks of a device by its type: guards, streams and events, generators, pinned memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>
#include <vector>

#include "async_device/csrc/generator.h"
#include "async_device/csrc/settings.h"
#include "async_device/csrc/tensors.h"

namespace async_device {
namespace {

Device& the_device() { return Device::get(); }

c10::DeviceIndex narrow(int index) { return static_cast<c10::DeviceIndex>(index); }

EventPtr& event_of(void* event) { return *static_cast<EventPtr*>(event); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDeviceType;  // NOLINT: c10's name

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const int before = current_device();
    setDevice(to);
    return {kDeviceType, narrow(before)};
  }
  c10::Device getDevice() const override { return {kDeviceType, narrow(current_device())}; }
  void setDevice(c10::Device to) const override {
    if (to.index() >= Device::kNumDevices) raise("there is no device " + to.str());
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current_device() = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return Device::kNumDevices; }
#if __has_include(<c10/core/DeviceCapability.h>)  // since PyTorch 2.10
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
#endif

  c10::Stream getStream(c10::Device of) const override {
    return to_c10(the_device().current_stream(index_of(of)));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return to_c10(the_device().default_stream(index_of(of)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool is_high) const override {
    return to_c10(the_device().pool_stream(index_of(of), is_high));
  }
  c10::Stream getNewStream(c10::Device of, int priority) const override {
    return to_c10(the_device().pool_stream(index_of(of), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return to_c10(the_device().exchange_stream(stream_of(to)));
  }
  // Overrides nothing before PyTorch 2.11.
  C10_CLANG_DIAGNOSTIC_PUSH()
  C10_CLANG_DIAGNOSTIC_IGNORE("-Winconsistent-missing-override")
  // NOLINTNEXTLINE(modernize-use-override)
  void* getStreamNativeHandle(const c10::Stream of) const { return stream_of(of); }
  C10_CLANG_DIAGNOSTIC_POP()
  bool queryStream(const c10::Stream& of) const override {
    return the_device().query(the_device().record(stream_of(of)));
  }
  void synchronizeStream(const c10::Stream& of) const override {
    the_device().host_sync("Stream.synchronize");
    the_device().synchronize_stream(stream_of(of));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    the_device().host_sync("synchronize");
    the_device().synchronize_device(index < 0 ? current_device() : index);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr();
    event_of(*event) = the_device().record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) the_device().wait(stream_of(stream), event_of(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || the_device().query(event_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    the_device().host_sync("Event.synchronize");
    the_device().synchronize(event_of(event));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    if (begin == nullptr || end == nullptr || !event_of(begin)->is_done ||
        !event_of(end)->is_done) {
      raise("elapsed_time: both events must have been recorded and have happened");
    }
    return event_of(end)->time_ms - event_of(begin)->time_ms;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (Block* block = block_of(data)) the_device().record_stream(block, stream_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : public at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kDeviceType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Device::kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device() = index; }
  c10::DeviceIndex getCurrentDevice() const override { return narrow(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return narrow(std::exchange(current_device(), index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override {
    return {kDeviceType, narrow(current_device())};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device() : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? narrow(current_device()) : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, static_cast<int64_t>(bytes));
  }
};

[[maybe_unused]] const bool kHooksAreRegistered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

const at::Generator& default_generator(int index) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < Device::kNumDevices; ++i) {
      all.push_back(at::make_generator<Generator>(narrow(i)));
    }
    return all;
  }();
  return generators.at(static_cast<size_t>(index));
}

}  // namespace async_device
