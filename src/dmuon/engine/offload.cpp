#include "dmuon/engine/offload.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "dmuon/wire/freed_storage.h"

namespace dmuon::engine {
namespace {

constexpr const char* kOut =
    "dmuon.offload: a tensor that was moved to the host was read or changed. Expected: "
    "dmuon.load(model) first.";

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// PyTorch rounds pinned memory up to a power of two, and keeps it. So pieces have such sizes.
std::vector<at::Tensor> host_pieces_for(const at::Tensor& tensor) {
  constexpr std::int64_t kLeast = std::int64_t{1} << 20;
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  std::vector<at::Tensor> pieces;
  std::int64_t left = tensor.numel();
  while (left > 0) {
    const bool is_last = tensor.is_cpu() || left <= kLeast;
    const std::int64_t size =
        is_last ? left
                : static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(left)));
    pieces.push_back(at::empty({size}, options.pinned_memory(!tensor.is_cpu())));
    left -= size;
  }
  return pieces;
}

// Calls it with each piece of the tensor, and the host's.
template <typename Moved, typename Call>
void for_each_piece(const Moved& moved, const Call& call) {
  const at::Tensor flat = moved.tensor.view({-1});
  std::int64_t begin = 0;
  for (const at::Tensor& piece : moved.on_host) {
    call(flat.narrow(0, begin, piece.numel()), piece);
    begin += piece.numel();
  }
}

}  // namespace

void Offload::move_out() {
  if (is_out()) return;
  std::vector<Moved> moved;
  for (const at::Tensor& tensor : executor_->lasting_tensors()) {
    if (tensor.numel() == 0) continue;
    moved.push_back({tensor, host_pieces_for(tensor)});
  }
  for (const Moved& one : moved)
    for_each_piece(one, [](const at::Tensor& piece, const at::Tensor& on_host) {
      at::Tensor(on_host).copy_(piece);
    });
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
  for (const Moved& one : moved_)
    for_each_piece(one, [](const at::Tensor& piece, const at::Tensor& on_host) {
      at::Tensor(piece).copy_(on_host);
    });
  moved_.clear();
}

}  // namespace dmuon::engine
