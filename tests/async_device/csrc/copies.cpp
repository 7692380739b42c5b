// Copies between devices and the host, values for the host, and pinned memory.
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "async_device/csrc/statistics.h"
#include "async_device/csrc/tensors.h"

namespace async_device {
namespace {

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_bytes;  // by address

void free_pinned(void* address) {
  {
    const std::scoped_lock lock(pinned_mutex);
    pinned_bytes.erase(static_cast<char*>(address));
  }
  std::free(address);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t rounded = (std::max<size_t>(bytes, 1) + 63) / 64 * 64;
    void* address = std::aligned_alloc(64, rounded);
    const std::scoped_lock lock(pinned_mutex);
    pinned_bytes[static_cast<char*>(address)] = rounded;
    return {address, address, &free_pinned, c10::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

/// Each waits for the other's current stream, as CUDA's copies between devices do.
void copy_on_device(const at::Tensor& self, const at::Tensor& destination) {
  static const std::string* const kName = interned("aten::copy_");
  Device& device = Device::get();
  Stream* ours = device.current_stream(index_of(destination.device()));
  Stream* theirs = device.current_stream(index_of(self.device()));
  std::vector<Use> uses;
  add_use(uses, self, false);
  add_use(uses, destination, true);
  if (theirs != ours) device.wait(ours, device.record(theirs));
  const auto copy = [from = host_alias(self), to = host_alias(destination)]() { to.copy_(from); };
  device.enqueue(ours, {kName, copy, std::move(uses)});
  Statistics::get().count_kernel(ours->kind);
  if (theirs != ours) device.wait(theirs, device.record(ours));
}

/// From pinned memory, and without blocking, the source is read when the stream comes to it; else
/// what it holds now is copied, as the driver does with pageable memory.
void copy_to_device(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  static const std::string* const kName = interned("copy from the host");
  Device& device = Device::get();
  Stream* stream = device.current_stream(current_device());
  std::vector<Use> uses;
  add_use(uses, destination, true);
  const bool is_late = non_blocking && is_pinned(self.storage().data());
  const at::Tensor source = is_late ? self.detach() : self.detach().clone();
  const auto copy = [source, to = host_alias(destination)]() { to.copy_(source); };
  device.enqueue(stream, {kName, copy, std::move(uses)});
  if (non_blocking) return;
  device.host_sync("copy from the host");
  device.synchronize_stream(stream);
}

void copy_to_host(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  static const std::string* const kName = interned("copy to the host");
  Device& device = Device::get();
  Stream* stream = device.current_stream(current_device());
  std::vector<Use> uses;
  add_use(uses, self, false);
  const auto copy = [from = host_alias(self), to = destination.detach()]() { to.copy_(from); };
  device.enqueue(stream, {kName, copy, std::move(uses)});
  if (non_blocking && is_pinned(destination.storage().data())) return;
  device.host_sync("copy to the host");
  device.synchronize_stream(stream);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  static const std::string* const kName = interned("aten::item");
  const c10::DeviceGuard guard(self.device());
  Device& device = Device::get();
  Stream* stream = device.current_stream(current_device());
  std::vector<Use> uses;
  add_use(uses, self, false);
  const auto value = std::make_shared<at::Scalar>();
  const auto read = [value, from = host_alias(self)] { *value = from.item(); };
  device.enqueue(stream, {kName, read, std::move(uses)});
  device.host_sync("item");
  device.synchronize_stream(stream);
  return *value;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
}

}  // namespace

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  const auto* wanted = static_cast<const char*>(address);
  const std::scoped_lock lock(pinned_mutex);
  auto after = pinned_bytes.upper_bound(wanted);
  if (after == pinned_bytes.begin()) return false;
  const auto& [begin, bytes] = *--after;
  return wanted < begin + bytes;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) return destination;
  const bool comes = is_on_device(destination);
  const c10::DeviceGuard guard(comes ? destination.device() : self.device());
  if (comes && is_on_device(self)) {
    copy_on_device(self, destination);
  } else if (comes) {
    copy_to_device(self, destination, non_blocking);
  } else {
    copy_to_host(self, destination, non_blocking);
  }
  return destination;
}

}  // namespace async_device
