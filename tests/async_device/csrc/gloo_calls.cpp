#include "async_device/csrc/gloo_calls.h"

namespace async_device {
namespace {

/// Returns the reduction that gloo runs in place of `wanted`.
c10d::ReduceOp gloo_op(const c10d::ReduceOp& wanted) {
  const bool is_sum = wanted == c10d::ReduceOp::AVG || wanted == c10d::ReduceOp::PREMUL_SUM;
  return is_sum ? c10d::ReduceOp(c10d::ReduceOp::SUM) : wanted;
}

/// Scales the input before a sum of multiples.
void multiply(const c10d::ReduceOp& wanted, at::Tensor& input) {
  if (wanted != c10d::ReduceOp::PREMUL_SUM) return;
  const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(wanted.supplement_.get());
  if (factor->tensor_factor.defined()) {
    input.mul_(factor->tensor_factor.cpu());
  } else {
    input.mul_(factor->double_factor);
  }
}

/// Divides the sum for an average.
void divide(const c10d::ReduceOp& wanted, at::Tensor& output, int num_ranks) {
  if (wanted == c10d::ReduceOp::AVG) output.div_(num_ranks);
}

}  // namespace

void all_reduce(c10d::Backend& gloo, Tensors& tensors, const c10d::AllreduceOptions& options) {
  for (at::Tensor& tensor : tensors) {
    c10d::AllreduceOptions summed = options;
    summed.reduceOp = gloo_op(options.reduceOp);
    Tensors one{tensor};
    multiply(options.reduceOp, tensor);
    gloo.allreduce(one, summed)->wait();
    divide(options.reduceOp, tensor, gloo.getSize());
  }
}

void reduce(c10d::Backend& gloo, at::Tensor& tensor, const c10d::ReduceOptions& options) {
  c10d::ReduceOptions summed = options;
  summed.reduceOp = gloo_op(options.reduceOp);
  Tensors one{tensor.clone()};  // gloo keeps partial sums in it
  multiply(options.reduceOp, one[0]);
  gloo.reduce(one, summed)->wait();
  if (options.rootRank != gloo.getRank()) return;
  divide(options.reduceOp, one[0], gloo.getSize());
  tensor.copy_(one[0]);
}

void all_gather(c10d::Backend& gloo, at::Tensor& output, const at::Tensor& input,
                const c10d::AllgatherOptions& options) {
  at::Tensor own = input.clone();  // it may be part of the output
  gloo._allgather_base(output, own, options)->wait();
}

void reduce_scatter(c10d::Backend& gloo, at::Tensor& output, const at::Tensor& input,
                    const c10d::ReduceScatterOptions& options) {
  c10d::ReduceScatterOptions summed = options;
  summed.reduceOp = gloo_op(options.reduceOp);
  at::Tensor own = input.clone();
  multiply(options.reduceOp, own);
  gloo._reduce_scatter_base(output, own, summed)->wait();
  divide(options.reduceOp, output, gloo.getSize());
}

}  // namespace async_device
