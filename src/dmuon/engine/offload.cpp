#include "dmuon/engine/offload.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "dmuon/wire/freed_storage.h"

namespace dmuon::engine {
namespace {

constexpr const char* kOut =
    "dmuon.offload: a tensor that was moved to the host was read or changed. Expected: "
    "dmuon.load(model) first.";

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

void Offload::move_out() {
  if (is_out()) return;
  std::vector<Moved> moved;
  for (const at::Tensor& tensor : executor_->lasting_tensors()) {
    if (tensor.numel() == 0) continue;
    const auto options = at::TensorOptions().dtype(tensor.scalar_type());
    moved.push_back({tensor, at::empty(tensor.sizes(),
                                       options.device(at::kCPU).pinned_memory(!tensor.is_cpu()))});
  }
  for (const Moved& one : moved) at::Tensor(one.on_host).copy_(one.tensor);
  for (const Moved& one : moved) {
    executor_->pool().count(-static_cast<std::int64_t>(one.tensor.nbytes()));
    // Views need the storage's size, so it stays.
    storage_of(one.tensor)->set_data_ptr_noswap(c10::DataPtr(nullptr, one.tensor.device()));
    wire::set_read_error(storage_of(one.tensor), kOut);
  }
  moved_ = std::move(moved);
}

void Offload::move_back() {
  std::vector<c10::DataPtr> memory;
  for (const Moved& one : moved_)
    memory.push_back(
        executor_->pool().allocate(static_cast<std::int64_t>(storage_of(one.tensor)->nbytes())));
  for (std::size_t i = 0; i < moved_.size(); ++i) {
    const at::Tensor& tensor = moved_[i].tensor;
    wire::clear_read_error(storage_of(tensor));
    storage_of(tensor)->set_data_ptr_noswap(std::move(memory[i]));
    executor_->pool().count(static_cast<std::int64_t>(tensor.nbytes()));
  }
  for (const Moved& one : moved_) at::Tensor(one.tensor).copy_(one.on_host);
  moved_.clear();
}

}  // namespace dmuon::engine
