#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/graph.h"
#include "dmuon/kernels/cuda/library.h"

// A build without a working nvcc compiles this file instead of driver.cpp and library.cpp.
namespace dmuon::kernels::cuda {
namespace {

constexpr const char* kReason = "dmuon was built without CUDA kernels: " DMUON_WHY_NO_KERNELS;

}  // namespace

std::string unavailable(int) { return kReason; }
void prepare(int) { throw core::CudaError(kReason); }
int num_multiprocessors(int) { throw core::CudaError(kReason); }
bool is_captured(void*) { throw core::CudaError(kReason); }
bool has_product90(int) { return false; }
TensorMap tensor_map(const Mapped&) { throw core::CudaError(kReason); }
void launch(const Launch&, const void*, std::size_t, int, void*) { throw core::CudaError(kReason); }

Graph::Graph(void*, const std::function<void()>&) { throw core::CudaError(kReason); }
Graph::~Graph() = default;
void Graph::launch(void*) const { throw core::CudaError(kReason); }

}  // namespace dmuon::kernels::cuda
