#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "dmuon/core/idle_blocks.h"

namespace dmuon::wire {

/// Hands out device memory for packed buffers, and counts every byte that it holds. On CPUs, whose
/// allocator returns pages to the system, it keeps what comes back for the next buffer, so that
/// units of like size share one, and counts it too. A device's own allocator does that, for
/// everything else in the process as well.
///
/// A block goes on in the order of streams: whoever has its memory next comes after all that was
/// issued to the stream on which it was given back. Not thread-safe.
class BufferPool {
 public:
  explicit BufferPool(c10::Device device);
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// At least `num_bytes`, uninitialised. Prefers an idle block; otherwise frees idle blocks before
  /// it allocates, as far as the peak would grow, so that idle memory as such adds to none.
  c10::DataPtr take(std::int64_t num_bytes, std::int64_t* block_bytes);

  /// Returns a block of `block_bytes`.
  void give(c10::DataPtr data, std::int64_t block_bytes);

  /// Memory that the engine keeps outside the pool (node copies, owned state) is counted too.
  void count(std::int64_t num_bytes);

  std::int64_t current_bytes() const { return current_bytes_; }
  std::int64_t peak_bytes() const { return peak_bytes_; }
  /// Blocks that were asked of the device's allocator.
  std::int64_t num_allocations() const { return num_allocations_; }
  void reset_peak() { peak_bytes_ = current_bytes_; }

  c10::Device device() const { return device_; }

 private:
  c10::Device device_;
  c10::Allocator* allocator_;
  core::IdleBlocks<c10::DataPtr> idle_;
  std::int64_t current_bytes_ = 0;
  std::int64_t peak_bytes_ = 0;
  std::int64_t num_allocations_ = 0;
};

/// A flat tensor whose storage is freed and refilled while the tensor, and every view of it, lives
/// on. Reading it while it is freed raises (c10::Error) instead of crashing.
class PackedBuffer {
 public:
  PackedBuffer(std::shared_ptr<BufferPool> pool, std::int64_t num_elements, at::ScalarType dtype);
  ~PackedBuffer();
  PackedBuffer(const PackedBuffer&) = delete;
  PackedBuffer& operator=(const PackedBuffer&) = delete;

  /// Gives the tensor storage, uninitialised. Nothing if it has some.
  void allocate();

  /// Returns the storage to the pool. Nothing if it has none.
  void release();

  bool allocated() const { return allocated_; }
  std::int64_t num_bytes() const { return num_bytes_; }

  /// [num_elements], of the constructor's dtype; always the same tensor.
  const at::Tensor& flat() const { return flat_; }

  /// View of these sizes at `offset` with a version counter of its own: a parameter made from it
  /// does not see writes to the buffer as in-place changes. May be called while the buffer is
  /// freed.
  at::Tensor view(std::int64_t offset, at::IntArrayRef sizes) const;

  /// [end - begin] view that shares the buffer's version counter. Only while allocated.
  at::Tensor slice(std::int64_t begin, std::int64_t end) const;

 private:
  std::shared_ptr<BufferPool> pool_;
  std::int64_t num_bytes_;
  std::int64_t block_bytes_ = 0;
  bool allocated_ = false;
  at::Tensor flat_;
};

}  // namespace dmuon::wire
