#include "dmuon/wire/buffer.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/wire/freed_storage.h"
#include "dmuon/wire/pages.h"

namespace dmuon::wire {
namespace {

constexpr const char* kFreed =
    " was read or changed after it was freed. Expected: its use while modules of its unit compute; "
    "dedicate_params(..., reshard_after_forward=False), which keeps weights until the backward; "
    "or, outside of the model's calls, dmuon.full_params(model).";

}  // namespace

BufferPool::BufferPool(c10::Device device) : device_(device), allocator_(page_allocator()) {
  if (device.is_cpu()) return;
  const at::Tensor probe = at::empty({1}, at::TensorOptions().device(device));
  allocator_ = probe.storage().allocator();
}

void BufferPool::count(std::int64_t num_bytes) {
  current_bytes_ += num_bytes;
  peak_bytes_ = std::max(peak_bytes_, current_bytes_);
}

c10::DataPtr BufferPool::take(std::int64_t num_bytes, std::int64_t* block_bytes) {
  if (auto idle = idle_.take(num_bytes)) {
    *block_bytes = idle->first;
    return std::move(idle->second);
  }
  count(-idle_.free_at_least(current_bytes_ + num_bytes - peak_bytes_));
  c10::DataPtr block = allocate(num_bytes);  // where this raises, nothing is counted
  ++num_allocations_;
  *block_bytes = num_bytes;
  count(num_bytes);
  return block;
}

c10::DataPtr BufferPool::allocate(std::int64_t num_bytes) const {
  const c10::OptionalDeviceGuard guard(device_);  // an allocator uses the current device
  return allocator_->allocate(static_cast<std::size_t>(num_bytes));
}

at::Tensor BufferPool::empty(at::IntArrayRef sizes, at::ScalarType dtype) const {
  if (!device_.is_cpu()) return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device_));
  return at::Tensor(at::detail::empty_generic(
      sizes, allocator_, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt));
}

void BufferPool::give(c10::DataPtr data, std::int64_t block_bytes) {
  if (device_.is_cpu()) return idle_.give(block_bytes, std::move(data));
  // The allocator may reuse a block at once on the stream on which it was allocated.
  const c10::impl::VirtualGuardImpl guard(device_.type());
  guard.recordDataPtrOnStream(data, guard.getStream(device_));
  count(-block_bytes);
}

PackedBuffer::PackedBuffer(std::shared_ptr<BufferPool> pool, std::int64_t num_elements,
                           at::ScalarType dtype, const std::string& what)
    : pool_(std::move(pool)),
      freed_(core::message("dmuon: ", what, kFreed)),
      num_bytes_(num_elements * static_cast<std::int64_t>(c10::elementSize(dtype))),
      flat_(at::empty({0}, at::TensorOptions().dtype(dtype).device(pool_->device()))) {
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  storage->set_resizable(false);
  flat_.unsafeGetTensorImpl()->set_sizes_contiguous({num_elements});
  // Views of a freed tensor are made without a look at its memory, and raise where they are read.
  storage->set_nbytes(static_cast<std::size_t>(num_bytes_));
  if (num_bytes_ > 0) set_read_error(storage, freed_);
}

PackedBuffer::~PackedBuffer() {
  try {
    release();
  } catch (const std::exception&) {  // a device that has failed, or that a forked child cannot use
  }
}

void PackedBuffer::allocate() {
  if (allocated_) return;
  c10::DataPtr block = pool_->take(num_bytes_, &block_bytes_);
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  clear_read_error(storage);
  storage->set_data_ptr_noswap(std::move(block));
  allocated_ = true;
}

void PackedBuffer::release() {
  if (!allocated_) return;
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  c10::DataPtr block = storage->set_data_ptr(c10::DataPtr(nullptr, pool_->device()));
  if (num_bytes_ > 0) set_read_error(storage, freed_);
  pool_->give(std::move(block), block_bytes_);
  allocated_ = false;
}

at::Tensor PackedBuffer::view(std::int64_t offset, at::IntArrayRef sizes) const {
  const std::int64_t num_elements = c10::multiply_integers(sizes);
  return flat_.variable_data().narrow(0, offset, num_elements).view(sizes).variable_data();
}

at::Tensor PackedBuffer::slice(std::int64_t begin, std::int64_t end) const {
  return flat_.narrow(0, begin, end - begin);
}

}  // namespace dmuon::wire
