#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <string>

#include "dmuon/core/idle_blocks.h"

namespace dmuon::wire {

/// Hands out device memory for packed buffers, and counts every byte that it holds.
///
///   std::int64_t block_bytes = 0;
///   c10::DataPtr block = pool.take(num_bytes, &block_bytes);
///   pool.give(std::move(block), block_bytes);
///
/// On CPUs the memory is page_allocator()'s, which returns pages to the system. So the pool keeps
/// and counts returned blocks, and units of like size share one. A device's own allocator keeps
/// blocks itself, for all users in the process.
///
/// The next user of a block comes after all work that was issued to the stream on which the block
/// was returned. Not thread-safe.
class BufferPool {
 public:
  explicit BufferPool(c10::Device device);
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// Returns at least `num_bytes`, uninitialised. Prefers an idle block. Before it allocates, it
  /// frees idle blocks as far as the peak would grow. So idle memory never raises the peak.
  c10::DataPtr take(std::int64_t num_bytes, std::int64_t* block_bytes);

  /// Returns a block of `block_bytes`.
  void give(c10::DataPtr data, std::int64_t block_bytes);

  /// Returns memory outside the pool, uninitialised, which the caller counts.
  c10::DataPtr allocate(std::int64_t num_bytes) const;

  /// Returns a tensor in such memory.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Counts memory that the engine keeps outside the pool (node copies, owned state).
  void count(std::int64_t num_bytes);

  std::int64_t current_bytes() const { return current_bytes_; }
  std::int64_t peak_bytes() const { return peak_bytes_; }
  /// Number of blocks that the device's allocator made.
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

/// A flat tensor whose storage is freed and refilled while the tensor and its views live on.
///
///   PackedBuffer weights(pool, num_elements, at::kBFloat16);
///   const at::Tensor matrix = weights.view(offset, {rows, cols});  // lives as long as the model
///   weights.allocate();                                            // around each use
///   weights.release();
///
/// Reading a freed tensor, or a view of it, raises (c10::Error) instead of crashing.
class PackedBuffer {
 public:
  /// @param what  names the content in the error of a read of the freed buffer.
  PackedBuffer(std::shared_ptr<BufferPool> pool, std::int64_t num_elements, at::ScalarType dtype,
               const std::string& what = "a buffer");
  ~PackedBuffer();
  PackedBuffer(const PackedBuffer&) = delete;
  PackedBuffer& operator=(const PackedBuffer&) = delete;

  /// Gives the tensor storage, uninitialised. Idempotent.
  void allocate();

  /// Returns the storage to the pool. Idempotent.
  void release();

  bool allocated() const { return allocated_; }

  /// [num_elements], of the constructor's dtype; always the same tensor.
  const at::Tensor& flat() const { return flat_; }

  /// Returns a view of these sizes at `offset` with a version counter of its own: for a parameter
  /// made from the view, writes to the buffer are no in-place changes. Works on a freed buffer too.
  at::Tensor view(std::int64_t offset, at::IntArrayRef sizes) const;

  /// Returns an [end - begin] view that shares the buffer's version counter.
  at::Tensor slice(std::int64_t begin, std::int64_t end) const;

 private:
  std::shared_ptr<BufferPool> pool_;
  std::string freed_;  // error of a read of freed memory
  std::int64_t num_bytes_;
  std::int64_t block_bytes_ = 0;
  bool allocated_ = false;
  at::Tensor flat_;
};

}  // namespace dmuon::wire
