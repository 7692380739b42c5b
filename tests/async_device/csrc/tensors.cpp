#include "async_device/csrc/tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>

#include <cstring>

#include "async_device/csrc/settings.h"

namespace async_device {
namespace {

void free_block(void* context) {
  if (context != nullptr) Device::get().free(static_cast<Block*>(context));
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(current_device()));
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    Block* block = Device::get().allocate(static_cast<int64_t>(bytes), current_device());
    return {block->address, block, &free_block, device};
  }

  void copy_data(void*, const void*, std::size_t) const override {
    raise("Allocator.copy_data: nothing on this device should need it");
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDeviceType, &allocator);

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

}  // namespace

c10::Allocator* device_allocator() { return &allocator; }

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0 || !is_on_device(tensor)) return;
  Block* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr) return;
  const auto item = static_cast<int64_t>(tensor.itemsize());
  uses.push_back(
      {block, make_region(tensor.sizes(), tensor.strides(), tensor.storage_offset(), item), write});
}

at::Tensor host_alias(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  if (!tensor.has_storage()) raise("a kernel was given a tensor without storage");
  Block* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr && tensor.numel() != 0) {
    tensor.const_data_ptr();  // raises where the storage says why it has none
    raise("a kernel was given a tensor whose storage is freed");
  }
  void* data = block == nullptr ? nullptr : block->host;
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(data, c10::Device(c10::kCPU)), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  c10::TensorImpl* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return alias;
}

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kDeviceKeys, dtype);
}

at::Tensor make_view(const at::Tensor& self, at::ScalarType dtype, c10::IntArrayRef sizes,
                     c10::IntArrayRef strides, int64_t offset) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), type);
  at::native::checkInBoundsForStorage(sizes, strides, offset, type, view.storage());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

void set_geometry(const at::Tensor& self, c10::IntArrayRef sizes,
                  c10::OptionalIntArrayRef strides) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (strides) {
    impl->set_sizes_and_strides(sizes, *strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  const auto bytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), static_cast<int64_t>(bytes));
}

void resize_storage(const c10::Storage& storage, int64_t bytes) {
  static const std::string* const kName = interned("resize of a storage");
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const auto before = static_cast<int64_t>(impl->nbytes());
  if (bytes == before) return;
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = allocator.allocate(static_cast<size_t>(bytes));
  Block* from = block_of(impl->data_ptr());
  Block* to = block_of(data);
  if (from != nullptr && to != nullptr) {
    const int64_t kept = std::min(before, bytes);
    const Region region = make_region(0, kept);
    Device& device = Device::get();
    device.enqueue(device.current_stream(current_device()),
                   {kName,
                    [=] { std::memcpy(to->host, from->host, static_cast<size_t>(kept)); },
                    {{from, region, false}, {to, region, true}}});
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(static_cast<size_t>(bytes));
}

Stream* stream_of(const c10::Stream& stream) {
  return Device::get().stream(stream.id() == 0 ? stream.device_index()
                                               : static_cast<int>(stream.id()));
}

c10::Stream to_c10(const Stream* stream) {
  const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(stream->device));
  const bool is_default = stream->id < Device::kNumDevices;
  return c10::Stream(c10::Stream::UNSAFE, device, is_default ? 0 : stream->id);
}

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

}  // namespace async_device
