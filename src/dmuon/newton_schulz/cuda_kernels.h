#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/product.h"
#include "dmuon/newton_schulz/scalar.h"

// What elementwise/cuda.cpp and products/cuda.cpp share.
namespace dmuon::newton_schulz {

/// Returns why dmuon's CUDA kernels (kernels/cuda) do not run on this device, in one sentence;
/// empty: they do. The first call for a device compares their results with ATen's there, and waits
/// for the device. If they fail, there is a warning. Thread-safe.
std::string why_no_cuda_kernels(c10::Device device);

/// True where dmuon's kernels are the default: on devices with compute capability 9.0, where they
/// have been seen to win (tests/gpu/README.md), if there is no reason above. False during a capture
/// if the answer is not known yet, because the kernels' test would spoil the capture. Thread-safe.
bool prefers_cuda_kernels(c10::Device device);

/// Returns the current stream's cudaStream_t, without a CUDA header or library. For devices without
/// a reason above.
void* current_stream(c10::Device device);

/// Returns at least `count` zeros for kernels that leave zeros behind. All calls for a stream get
/// the same ones, so no kernel has to clear them each time. They are never freed. Thread-safe.
/// @param stream  the device's current stream, on which nothing is being captured. Not
///                cudaStreamPerThread, one handle of several streams.
at::Tensor kept_zeros(std::int64_t count, const at::TensorOptions& options, void* stream);

/// out[i] <- numbers[i], rounded to fp32, on the current stream.
/// @param out  [numbers] fp32, contiguous, on a device without a reason above.
void write_scalars(std::span<const double> numbers, const at::Tensor& out);

/// Where kernels read scalars: at Scalar::on_device if all of them are on the device already, else
/// in memory that a launch writes now. It stays valid as long as this object, on its stream.
class ScalarsOnDevice {
 public:
  ScalarsOnDevice(std::initializer_list<Scalar> scalars, const at::Tensor& like);
  const float* operator[](std::size_t scalar) const { return addresses_.at(scalar); }

 private:
  at::Tensor own_;
  std::vector<const float*> addresses_;
};

/// The matrices of a tensor [..., rows, cols] of two to four dimensions: `outer` times `inner`.
struct MatricesOf {
  explicit MatricesOf(const at::Tensor& x)
      : outer(x.dim() < 3 ? 1 : x.size(0)),
        inner(x.dim() < 4 ? 1 : x.size(1)),
        outer_stride(x.dim() < 3 ? 0 : x.stride(0)),
        inner_stride(x.dim() < 4 ? 0 : x.stride(1)) {}
  std::int64_t size() const { return outer * inner; }

  std::int64_t outer, inner, outer_stride, inner_stride;
};

/// Computes Products::symmetric_product, or Products::product, by this kernel.
/// @return  False if the kernel cannot, for its operands' strides: then it has done nothing.
bool product_by(const kernels::cuda::ProductChoice& choice, bool symmetric, const at::Tensor& out,
                double beta, const at::Tensor& c, double alpha, const at::Tensor& a,
                const at::Tensor& b);

/// Returns nothing for dtypes of other sizes than 16 bits.
std::optional<kernels::cuda::Half> half_of(at::ScalarType dtype);

}  // namespace dmuon::newton_schulz
