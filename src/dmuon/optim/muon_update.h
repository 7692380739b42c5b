#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "dmuon/optim/batch_update.h"

namespace dmuon::optim {

/// Updates a batch of equally shaped matrices in place, by Muon (rules/muon.h): a BatchUpdate.
///
/// Bytes an element that are read and written beside the iteration's products, in bf16:
///
///   before it  14  a matrix by itself, on CPUs in fp32 and bf16: momentum in and out, gradient, X
///              26  otherwise: also the direction, out and in twice; CPUs' caches hold 12 of these
///              18  by kernels/cuda, in fp16 and bf16: also X, in and out, to be multiplied by
///                  its scale; 10 more where the guess of that scale was wrong
///   after it    8  by kernels/cpu, if the last product goes straight into the weights
///              12  otherwise: also the product's result, out and in
///
/// Interleaved rows take 40 more: 24 before to gather gradient and momentum, 16 after for weights.
///
/// A factor of the gradient (Piece::gradient_factor) takes none on CPUs, where nesterov is on or a
/// matrix is by itself; else 8, as a pass over the gradient would.
///
/// @param group       its rule is a Muon, or one that derives from it.
/// @param applies     [] bool, on the same device: false leaves master and momentum as they are,
///                    whatever the gradient holds. The host does not wait to learn it.
/// @param transposed  True if the learning rate takes columns for rows, and rows for columns.
/// @param memo        [..., 1, words * column_blocks] (newton_schulz::MomentumStep), or nothing;
///                    of interleaved rows words * the number of heights.
/// @param others      the rule's states after the momentum, as Piece has them.
/// @param heights     of interleaved rows (layout::View); then tensors are [b, rows, cols].
/// @throws InvalidArgument naming the first tensor that is no fp32 of master's sizes and device,
///         or the sizes of others, or heights that do not fit; or as method_for.
void muon_update(const at::Tensor& master, const at::Tensor& momentum, const at::Tensor& gradient,
                 const MuonGroup& group, const at::Tensor& applies, std::int64_t column_blocks = 1,
                 bool transposed = false, const std::optional<at::Tensor>& memo = {},
                 const std::vector<at::Tensor>& others = {},
                 const std::vector<std::int64_t>& heights = {});

}  // namespace dmuon::optim
