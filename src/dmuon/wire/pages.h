#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace dmuon::wire {

/// From so many bytes on a block has pages of its own.
inline constexpr std::size_t kOwnPages = std::size_t{1} << 17;

/// Returns an allocator of memory on the host whose large blocks each have pages of their own.
/// Freeing a block returns its pages to the system at once. Smaller blocks are PyTorch's.
///
/// malloc begins so too. But once a program has freed a large block, glibc takes all blocks of up
/// to 32 MB from heaps. A heap keeps the pages of a freed block until a later block fits there.
///
/// New pages are zeros that the system clears at their first use. PyTorch's profiler counts the
/// blocks. Thread-safe; the allocator lives as long as the process.
/// @throws c10::Error of PyTorch's allocator if there is no memory.
c10::Allocator* page_allocator();

}  // namespace dmuon::wire
