#pragma once

#include <functional>

namespace dmuon::kernels::cuda {

/// Kernels that a stream was given once, and that are launched again as one: a CUDA graph.
///
///     const Graph graph(stream, [&] { symmetric(...); move_weights(...); });  // nothing runs
///     graph.launch(stream);  // the same kernels with the same arguments, in the same order
///
/// The memory that they use must exist at each launch, under the same addresses. Not thread-safe.
class Graph {
 public:
  /// Calls `work`, which adds kernels to the stream by `launch` (library.h), and keeps them. `work`
  /// may do nothing in this thread that waits for the device, or allocates its memory. Other
  /// threads may. The thread has launched on the stream before, so that it has a context.
  /// @throws CudaError if the driver refuses; or what `work` throws. The stream then goes on
  ///         without what was captured.
  Graph(void* stream, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// @throws CudaError if the driver refuses.
  void launch(void* stream) const;

 private:
  void* executable_ = nullptr;
};

}  // namespace dmuon::kernels::cuda
