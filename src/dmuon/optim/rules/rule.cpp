#include "dmuon/optim/rules/rule.h"

#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::optim {
namespace {

[[noreturn]] void refuse_slices() {
  throw core::InvalidArgument(
      "Rule: this rule of update needs whole matrices: no tensor parallelism");
}

// Without its padding.
at::Tensor view(const at::Tensor& padded, at::IntArrayRef sizes) {
  const std::int64_t rows = sizes[sizes.size() - 2];
  const std::int64_t cols = sizes[sizes.size() - 1];
  return padded.narrow(-2, 0, rows).narrow(-1, 0, cols).view(sizes);
}

}  // namespace

std::vector<std::int64_t> State::sizes_of(const layout::View& view) const {
  const auto [state_rows, state_cols] =
      sizes(view.rows, view.cols / view.column_blocks, view.transposed);
  core::require(view.heights.empty() || state_rows == view.rows, "Muon: rule: state '", name,
                "': expected a row for each of the ", view.rows, " rows of a matrix whose view ",
                "interleaves them, got ", state_rows, "; a state of the user's has them by 'rows'");
  return {state_rows, state_cols * view.column_blocks};
}

void Orthogonalised::add_to_weights(const Piece& piece, const newton_schulz::Scalar& decay,
                                    const newton_schulz::Scalar& factor) const {
  const at::Tensor& weights = piece.weights;
  if (products->add_to_weights(weights, decay, factor, pending, piece.applies)) return;
  newton_schulz::PendingProduct product = pending;
  const at::Tensor scales = std::exchange(product.scales, {});
  const at::Tensor update = view(newton_schulz::computed(*products, product), weights.sizes());
  elementwise->move_weights({weights, decay, update, factor, piece.applies, scales, product.scale});
}

at::Tensor Orthogonalised::computed(at::IntArrayRef sizes) const {
  return view(newton_schulz::computed(*products, pending), sizes);
}

at::Tensor Rule::direction(const Piece& /*slices*/) const { refuse_slices(); }

void Rule::move(const Piece& /*slices*/, const at::Tensor& /*update*/, std::int64_t /*rows*/,
                std::int64_t /*cols*/) const {
  refuse_slices();
}

}  // namespace dmuon::optim
