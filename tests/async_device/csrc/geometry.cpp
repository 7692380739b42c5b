// Operators that only make or change geometry: they run nothing on the device.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <torch/library.h>

#include <utility>

#include "async_device/csrc/settings.h"
#include "async_device/csrc/tensors.h"

namespace async_device {
namespace {

at::Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<c10::Device> device,
                               std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return empty_on_device(sizes, strides, c10::dtype_or_default(dtype));
}

at::Tensor strided_view(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        std::optional<int64_t> offset) {
  return make_view(self, self.scalar_type(), sizes, strides,
                   offset.value_or(self.storage_offset()));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return strided_view(self, sizes, strides, std::nullopt);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes && !format) return self;
  set_geometry(self, sizes, std::nullopt);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset,
                               c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  const bool is_contiguous = strides.data() == nullptr || (strides.empty() && !sizes.empty());
  set_geometry(self, sizes, is_contiguous ? c10::OptionalIntArrayRef() : strides);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0),
                       device_allocator(), true);
  return set_storage_offset(self, std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (Block* block = block_of(self.storage().data_ptr())) {
    Device::get().record_stream(block, stream_of(stream));
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &strided_view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
}

}  // namespace
}  // namespace async_device
