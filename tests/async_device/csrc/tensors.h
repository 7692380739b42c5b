#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "async_device/csrc/device.h"

namespace async_device {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

inline bool is_on_device(const at::Tensor& tensor) { return tensor.device().type() == kDeviceType; }

/// Returns the block of a storage; null if it is empty or not the device's.
Block* block_of(const c10::DataPtr& data);

/// The allocator of device memory: on the current device, for its current stream.
c10::Allocator* device_allocator();

/// Adds the bytes of `tensor` to `uses`, if it is on the device and not empty.
void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool write);

/// Returns a CPU tensor on the same memory; only code that runs in a stream may read it.
/// @throws c10::Error if the storage has been freed.
at::Tensor host_alias(const at::Tensor& tensor);

/// On the current device.
at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

/// A view of `self` with this geometry.
at::Tensor make_view(const at::Tensor& self, at::ScalarType dtype, c10::IntArrayRef sizes,
                     c10::IntArrayRef strides, int64_t offset);

/// Gives a tensor these sizes, and its storage more bytes if it needs them.
void set_geometry(const at::Tensor& self, c10::IntArrayRef sizes, c10::OptionalIntArrayRef strides);

/// Copies a storage's content into new memory in the current stream, as CUDA does.
void resize_storage(const c10::Storage& storage, int64_t bytes);

/// Convert a c10 stream, and back.
Stream* stream_of(const c10::Stream& stream);
c10::Stream to_c10(const Stream* stream);

/// The index that a device has or, without one, the current device's.
int index_of(c10::Device device);

/// True if the address is of pinned host memory.
bool is_pinned(const void* address);
c10::Allocator* pinned_allocator();

/// Copies as of `copy_`; one side at least is on the device.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking);

}  // namespace async_device
