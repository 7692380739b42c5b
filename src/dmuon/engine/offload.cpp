#include "dmuon/engine/offload.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

void free_storage(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

void allocate_storage(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const std::size_t num_bytes = tensor.nbytes();
  const c10::OptionalDeviceGuard guard(tensor.device());  // an allocator uses the current device
  storage->set_data_ptr_noswap(c10::GetAllocator(tensor.device().type())->allocate(num_bytes));
  storage->set_nbytes(num_bytes);
}

}  // namespace

void Offload::move_out() {
  core::invariant(!is_out(), "Offload: out already");
  for (const at::Tensor& tensor : executor_->lasting_tensors()) {
    const auto options = at::TensorOptions().dtype(tensor.scalar_type());
    at::Tensor saved =
        at::empty(tensor.sizes(), options.device(at::kCPU).pinned_memory(!tensor.is_cpu()));
    saved.copy_(tensor);
    executor_->pool().count(-static_cast<std::int64_t>(tensor.nbytes()));
    free_storage(tensor);
    saved_.push_back(std::move(saved));
  }
  is_out_ = true;
}

void Offload::move_back() {
  const std::vector<at::Tensor> tensors = executor_->lasting_tensors();
  core::invariant(tensors.size() == saved_.size(), "Offload: other tensors than were moved out");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    allocate_storage(tensors[i]);
    executor_->pool().count(static_cast<std::int64_t>(tensors[i].nbytes()));
    tensors[i].copy_(saved_[i]);
    saved_[i].reset();
  }
  saved_.clear();
  is_out_ = false;
}

}  // namespace dmuon::engine
