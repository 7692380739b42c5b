#include "dmuon/wire/slice_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <numeric>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::wire {
namespace {

using layout::Block;
using layout::Segment;

at::Tensor narrowed(const at::Tensor& tensor, int dimension, const Segment& segment) {
  return tensor.narrow(dimension, segment.begin, segment.size());
}

// Copies parameters' elements of one rank between their matrices and the rank's memory.
// @param wholes  [parameters, matrices, rows, cols], of equal slices.
// @param flat    the rank's slices, one after the other.
void copy_slices(const at::Tensor& wholes, const layout::Slice& slice, const at::Tensor& flat,
                 SliceExchange::Way way) {
  const at::Tensor slices = flat.view({wholes.size(0), slice.num_elements()});
  for (const Block& block : slice.blocks) {
    const at::Tensor there = narrowed(narrowed(wholes, 1, block.matrices), 2, block.rows);
    const at::Tensor here =
        narrowed(slices, 1, block.elements)
            .view({-1, block.matrices.size(), block.rows.size(), block.cols.size()});
    std::int64_t begin = 0;
    for (const Segment& cols : block.cols.segments) {
      at::Tensor in_wholes = narrowed(there, 3, cols);
      at::Tensor in_slices = here.narrow(3, begin, cols.size());
      begin += cols.size();
      if (way == SliceExchange::Way::kGather) {
        in_wholes.copy_(in_slices);
      } else {
        in_slices.copy_(in_wholes);
      }
    }
  }
}

// As copy_slices, for all parameters of a run: those of equal slices together.
void copy_run(const SlicedRun& run, int rank, const at::Tensor& wholes, const at::Tensor& flat,
              SliceExchange::Way way) {
  const auto slice_of = [&](std::size_t i) -> const layout::Slice& {
    return run.parameters[i]->slices[static_cast<std::size_t>(rank)];
  };
  std::int64_t matrix = 0;
  std::int64_t element = 0;
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < run.parameters.size(); begin = end) {
    const layout::View& view = run.parameters[begin]->whole;
    while (end < run.parameters.size() && run.parameters[end]->whole == view &&
           slice_of(end) == slice_of(begin)) {
      ++end;
    }
    const auto count = static_cast<std::int64_t>(end - begin);
    const std::int64_t num_matrices = count * view.num_matrices;
    const std::int64_t num_elements = count * slice_of(begin).num_elements();
    copy_slices(wholes.narrow(0, matrix, num_matrices)
                    .view({count, view.num_matrices, view.rows, view.cols}),
                slice_of(begin), flat.narrow(0, element, num_elements), way);
    matrix += num_matrices;
    element += num_elements;
  }
}

}  // namespace

std::int64_t SlicedParameter::num_elements(int rank) const {
  if (is_replicated()) return whole.num_elements();
  return slices[static_cast<std::size_t>(rank)].num_elements();
}

bool may_share_run(const SlicedParameter& a, const SlicedParameter& b) {
  layout::View like_a = b.whole;
  like_a.num_matrices = a.whole.num_matrices;
  return a.owner == b.owner && a.whole == like_a && a.is_replicated() == b.is_replicated();
}

std::int64_t SlicedRun::num_matrices() const {
  return std::transform_reduce(
      parameters.begin(), parameters.end(), std::int64_t{0}, std::plus<>(),
      [](const SlicedParameter* parameter) { return parameter->whole.num_matrices; });
}

std::int64_t SlicedRun::num_elements(int rank) const {
  return std::transform_reduce(
      parameters.begin(), parameters.end(), std::int64_t{0}, std::plus<>(),
      [&](const SlicedParameter* parameter) { return parameter->num_elements(rank); });
}

SliceExchange::SliceExchange(Group* group, std::vector<SlicedRun> runs)
    : group_(group), runs_(std::move(runs)) {
  for (const SlicedRun& run : runs_) {
    core::invariant(0 <= run.owner() && run.owner() < group_->size(), "SliceExchange: owner ",
                    run.owner(), " of a group of ", group_->size());
  }
}

// Returns the runs whose elements travel to, or from, an owner. A replicated run's owner has all.
std::vector<std::size_t> SliceExchange::runs_of(int owner, Way way) const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const bool stays = way == Way::kGather && runs_[i].is_replicated();
    if (runs_[i].owner() == owner && !stays) found.push_back(i);
  }
  return found;
}

// [elements that a rank has of the owner's runs]
at::Tensor SliceExchange::buffer_of(int owner, int rank, Way way,
                                    const at::TensorOptions& options) const {
  std::int64_t num_elements = 0;
  for (const std::size_t run : runs_of(owner, way)) num_elements += runs_[run].num_elements(rank);
  return at::empty({num_elements}, options);
}

// Copies between this rank's matrices and what another rank has of them.
void SliceExchange::copy_own(const std::vector<at::Tensor>& wholes, int rank,
                             const at::Tensor& buffer, Way way) const {
  std::int64_t begin = 0;
  for (const std::size_t i : runs_of(group_->rank(), way)) {
    const at::Tensor part = buffer.narrow(0, begin, runs_[i].num_elements(rank));
    begin += part.numel();
    if (runs_[i].is_replicated()) {
      part.copy_(wholes[i].reshape({-1}));
    } else {
      copy_run(runs_[i], rank, wholes[i], part, way);
    }
  }
}

std::vector<at::Tensor> SliceExchange::gather(const std::vector<at::Tensor>& slices,
                                              const at::TensorOptions& options,
                                              const std::string& what) const {
  const int own = group_->rank();
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> received;
  for (int other = 0; other < group_->size(); ++other) {
    std::vector<at::Tensor> parts{at::empty({0}, options)};
    for (const std::size_t run : runs_of(other, Way::kGather)) parts.push_back(slices[run]);
    sent.push_back(at::cat(parts));
    received.push_back(buffer_of(own, other, Way::kGather, options));
  }
  wait_all(group_->all_to_all(received, sent, what));

  std::vector<at::Tensor> wholes(runs_.size());
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const SlicedRun& run = runs_[i];
    const std::vector<std::int64_t> sizes{run.num_matrices(), run.shape().rows, run.shape().cols};
    if (run.owner() != own) continue;
    wholes[i] = run.is_replicated() ? slices[i].view(sizes) : at::empty(sizes, options);
  }
  for (int other = 0; other < group_->size(); ++other)
    copy_own(wholes, other, received[static_cast<std::size_t>(other)], Way::kGather);
  return wholes;
}

std::vector<at::Tensor> SliceExchange::scatter(const std::vector<at::Tensor>& wholes,
                                               const at::TensorOptions& options,
                                               const std::string& what) const {
  const int own = group_->rank();
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> received;
  for (int other = 0; other < group_->size(); ++other) {
    sent.push_back(buffer_of(own, other, Way::kScatter, options));
    copy_own(wholes, other, sent.back(), Way::kScatter);
    received.push_back(buffer_of(other, own, Way::kScatter, options));
  }
  wait_all(group_->all_to_all(received, sent, what));

  std::vector<at::Tensor> slices(runs_.size());
  for (int owner = 0; owner < group_->size(); ++owner) {
    std::int64_t begin = 0;
    for (const std::size_t run : runs_of(owner, Way::kScatter)) {
      slices[run] =
          received[static_cast<std::size_t>(owner)].narrow(0, begin, runs_[run].num_elements(own));
      begin += slices[run].numel();
    }
  }
  return slices;
}

}  // namespace dmuon::wire
