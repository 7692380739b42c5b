// Implements the calls of a group, one by one: their reads, writes, messages and gloo calls.
#include <utility>

#include "async_device/csrc/group.h"
#include "async_device/csrc/tensors.h"

namespace async_device {
namespace {

using c10d::OpType;

bool is_on_cpu(const Tensors& tensors) { return !tensors.empty() && tensors[0].is_cpu(); }

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

Tensors aliases(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) all.push_back(host_alias(tensor));
  return all;
}

/// Returns the one list in `lists`, which only a root gives; empty on other ranks.
Tensors first_or_none(const std::vector<Tensors>& lists) {
  return lists.empty() ? Tensors{} : lists[0];
}

/// Returns one flat tensor of all elements.
at::Tensor flattened(const Tensors& tensors) {
  Tensors flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape(-1));
  return at::cat(flat);
}

}  // namespace

WorkPtr Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (is_on_cpu(tensors)) return gloo_->broadcast(tensors, options);
  const bool is_root = options.rootRank == getRank();
  Call call{"broadcast", OpType::BROADCAST, {}, {}, options.asyncOp, 0, nullptr};
  (is_root ? call.reads : call.writes) = tensors;
  call.bytes_sent = is_root ? bytes_of(tensors) : 0;
  call.run = [gloo = gloo_, all = aliases(tensors), options] {
    Tensors given = all;
    gloo->broadcast(given, options)->wait();
  };
  return add(std::move(call));
}

WorkPtr Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (is_on_cpu(tensors)) return gloo_->allreduce(tensors, options);
  const int64_t bytes = 2 * bytes_of(tensors) * (getSize() - 1) / getSize();
  return add({"allreduce", OpType::ALLREDUCE, tensors, tensors, options.asyncOp, bytes,
              [gloo = gloo_, all = aliases(tensors), options] {
                Tensors given = all;
                all_reduce(*gloo, given, options);
              }});
}

WorkPtr Group::allreduce_coalesced(Tensors& tensors,
                                   const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (is_on_cpu(tensors)) return gloo_->reduce(tensors, options);
  const bool is_root = options.rootRank == getRank();
  return add({"reduce", OpType::REDUCE, tensors, is_root ? tensors : Tensors{}, options.asyncOp,
              is_root ? 0 : bytes_of(tensors),
              [gloo = gloo_, alias = host_alias(tensors.at(0)), options] {
                at::Tensor given = alias;
                async_device::reduce(*gloo, given, options);
              }});
}

WorkPtr Group::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                         const c10d::AllgatherOptions& options) {
  if (is_on_cpu(inputs)) return gloo_->allgather(outputs, inputs, options);
  return add({"allgather", OpType::ALLGATHER, inputs, outputs.at(0), options.asyncOp,
              (getSize() - 1) * bytes_of(inputs),
              [gloo = gloo_, to = aliases(outputs[0]), from = aliases(inputs), options] {
                std::vector<Tensors> given_to{to};
                Tensors given_from = from;
                gloo->allgather(given_to, given_from, options)->wait();
              }});
}

WorkPtr Group::_allgather_base(at::Tensor& output, at::Tensor& input,
                               const c10d::AllgatherOptions& options) {
  if (input.is_cpu()) return gloo_->_allgather_base(output, input, options);
  Tensors outputs{output}, inputs{input};
  Call call{"allgather_into_tensor", OpType::_ALLGATHER_BASE,           inputs, outputs,
            options.asyncOp,         (getSize() - 1) * bytes_of(input), nullptr};
  call.run = [gloo = gloo_, to = host_alias(output), from = host_alias(input), options] {
    at::Tensor given = to;
    all_gather(*gloo, given, from, options);
  };
  return add(std::move(call));
}

WorkPtr Group::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) {
  return add({"allgather_into_tensor_coalesced", OpType::COALESCED, inputs, outputs,
              options.asyncOp, (getSize() - 1) * bytes_of(inputs),
              [gloo = gloo_, to = aliases(outputs), from = aliases(inputs), options] {
                for (size_t i = 0; i < to.size(); ++i) {
                  at::Tensor given = to[i];
                  all_gather(*gloo, given, from[i], options);
                }
              }});
}

WorkPtr Group::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ReduceScatterOptions& options) {
  if (is_on_cpu(outputs)) return gloo_->reduce_scatter(outputs, inputs, options);
  return add({"reduce_scatter", OpType::REDUCE_SCATTER, inputs.at(0), outputs, options.asyncOp,
              (getSize() - 1) * bytes_of(outputs),
              [gloo = gloo_, to = host_alias(outputs.at(0)), from = aliases(inputs[0]), options] {
                at::Tensor result = at::empty_like(to, at::MemoryFormat::Contiguous);
                async_device::reduce_scatter(*gloo, result, at::stack(from), options);
                to.copy_(result);
              }});
}

WorkPtr Group::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                    const c10d::ReduceScatterOptions& options) {
  if (input.is_cpu()) return gloo_->_reduce_scatter_base(output, input, options);
  return add({"reduce_scatter_tensor",
              OpType::_REDUCE_SCATTER_BASE,
              {input},
              {output},
              options.asyncOp,
              (getSize() - 1) * bytes_of(output),
              [gloo = gloo_, to = host_alias(output), from = host_alias(input), options] {
                at::Tensor given = to;
                async_device::reduce_scatter(*gloo, given, from, options);
              }});
}

WorkPtr Group::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  return add({"reduce_scatter_tensor_coalesced", OpType::COALESCED, inputs, outputs,
              options.asyncOp, (getSize() - 1) * bytes_of(outputs),
              [gloo = gloo_, to = aliases(outputs), from = aliases(inputs), options] {
                for (size_t i = 0; i < to.size(); ++i) {
                  at::Tensor given = to[i];
                  async_device::reduce_scatter(*gloo, given, from[i], options);
                }
              }});
}

WorkPtr Group::alltoall_base(at::Tensor& output, at::Tensor& input,
                             std::vector<int64_t>& output_counts,
                             std::vector<int64_t>& input_counts,
                             const c10d::AllToAllOptions& options) {
  if (input.is_cpu()) {
    return gloo_->alltoall_base(output, input, output_counts, input_counts, options);
  }
  const int64_t own =
      input_counts.empty() || input.size(0) == 0
          ? bytes_of(input) / getSize()
          : bytes_of(input) / input.size(0) * input_counts[static_cast<size_t>(getRank())];
  return add({"alltoall_base",
              OpType::ALLTOALL_BASE,
              {input},
              {output},
              options.asyncOp,
              bytes_of(input) - own,
              [gloo = gloo_, to = host_alias(output), from = host_alias(input), output_counts,
               input_counts, options]() mutable {
                gloo->alltoall_base(to, from, output_counts, input_counts, options)->wait();
              }});
}

WorkPtr Group::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const int64_t own = bytes_of(inputs.at(static_cast<size_t>(getRank())));
  return add({"alltoall", OpType::ALLTOALL, inputs, outputs, options.asyncOp,
              bytes_of(inputs) - own,
              [gloo = gloo_, to = aliases(outputs), from = aliases(inputs), options] {
                std::vector<int64_t> to_counts, from_counts;
                for (const at::Tensor& tensor : to) to_counts.push_back(tensor.numel());
                for (const at::Tensor& tensor : from) from_counts.push_back(tensor.numel());
                at::Tensor input = flattened(from), output = at::empty_like(flattened(to));
                const std::vector<int64_t> counts = to_counts;  // gloo takes those that it is given
                gloo->alltoall_base(output, input, to_counts, from_counts, options)->wait();
                const Tensors parts = output.split_with_sizes(counts);
                for (size_t i = 0; i < to.size(); ++i) to[i].copy_(parts[i].view_as(to[i]));
              }});
}

WorkPtr Group::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                      const c10d::GatherOptions& options) {
  if (is_on_cpu(inputs)) return gloo_->gather(outputs, inputs, options);
  const bool is_root = options.rootRank == getRank();
  const Tensors parts = first_or_none(outputs);
  return add({"gather", OpType::GATHER, inputs, parts, options.asyncOp,
              is_root ? 0 : bytes_of(inputs),
              [gloo = gloo_, to = aliases(parts), from = aliases(inputs), options] {
                std::vector<Tensors> given_to;
                if (!to.empty()) given_to.push_back(to);
                Tensors given_from = from;
                gloo->gather(given_to, given_from, options)->wait();
              }});
}

WorkPtr Group::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ScatterOptions& options) {
  if (is_on_cpu(outputs)) return gloo_->scatter(outputs, inputs, options);
  const bool is_root = options.rootRank == getRank();
  const Tensors parts = first_or_none(inputs);
  return add({"scatter", OpType::SCATTER, parts, outputs, options.asyncOp,
              is_root ? bytes_of(parts) - bytes_of(outputs) : 0,
              [gloo = gloo_, to = aliases(outputs), from = aliases(parts), options] {
                std::vector<Tensors> given_from;
                if (!from.empty()) given_from.push_back(from);
                Tensors given_to = to;
                gloo->scatter(given_to, given_from, options)->wait();
              }});
}

WorkPtr Group::send(Tensors& tensors, int to, int tag) {
  if (is_on_cpu(tensors)) return gloo_->send(tensors, to, tag);
  const auto start = [gloo = gloo_, all = aliases(tensors), to, tag] {
    Tensors given = all;
    return gloo->send(given, to, tag);
  };
  return add({"send to " + std::to_string(to),
              OpType::SEND,
              tensors,
              {},
              true,
              bytes_of(tensors),
              nullptr,
              to,
              start});
}

WorkPtr Group::recv(Tensors& tensors, int from, int tag) {
  if (is_on_cpu(tensors)) return gloo_->recv(tensors, from, tag);
  const auto start = [gloo = gloo_, all = aliases(tensors), from, tag] {
    Tensors given = all;
    return gloo->recv(given, from, tag);
  };
  return add({"receive from " + std::to_string(from),
              OpType::RECV,
              {},
              tensors,
              true,
              0,
              nullptr,
              from,
              start});
}

WorkPtr Group::barrier(const c10d::BarrierOptions& options) {
  Call call{"barrier", OpType::BARRIER, {}, {}, true, 0, [gloo = gloo_, options] {
              gloo->barrier(options)->wait();
            }};
  call.blocks_host = true;
  return add(std::move(call));
}

}  // namespace async_device
