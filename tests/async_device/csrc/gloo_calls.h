#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace async_device {

using Tensors = std::vector<at::Tensor>;

// Performs NCCL's calls by gloo on CPU tensors. Each call blocks until this rank's part is over,
// and @throws c10::Error or std::runtime_error of gloo's if a peer is lost or time is over.
//
// NCCL has two reductions that gloo lacks: the average and the sum of multiples. It lets an input
// be part of the output. It does not change the inputs of a reduction to a root.

void all_reduce(c10d::Backend& gloo, Tensors& tensors, const c10d::AllreduceOptions& options);

void reduce(c10d::Backend& gloo, at::Tensor& tensor, const c10d::ReduceOptions& options);

void all_gather(c10d::Backend& gloo, at::Tensor& output, const at::Tensor& input,
                const c10d::AllgatherOptions& options);

void reduce_scatter(c10d::Backend& gloo, at::Tensor& output, const at::Tensor& input,
                    const c10d::ReduceScatterOptions& options);

}  // namespace async_device
