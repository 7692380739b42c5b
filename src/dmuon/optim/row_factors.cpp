#include "dmuon/optim/row_factors.h"

#include "dmuon/core/error.h"

namespace dmuon::optim {

void check_row_factors(const RowFactors& factors, const wire::Owned& owned,
                       const layout::Parameters& parameters) {
  for (const auto& [parameter, values] : factors) {
    core::require(
        parameter.value() >= 0 && parameter.value() < parameters.size() && owned.owns(parameter),
        "muon_step: row_factors: expected parameters that this rank owns, got ", parameter.value());
    const layout::View& view = parameters[parameter].view;
    core::require(values.defined() && values.scalar_type() == at::kFloat && values.dim() == 1 &&
                      values.size(0) == view.num_matrices * view.rows,
                  "muon_step: row_factors: expected [", view.num_matrices * view.rows,
                  "] fp32 for parameter '", parameters[parameter].name, "', got ",
                  values.defined() ? values.toString() : "nothing", " ",
                  values.defined() ? values.sizes() : at::IntArrayRef());
  }
}

void scale_rows(const wire::OwnedBatch& batch, const RowFactors& factors) {
  if (factors.empty()) return;
  for (std::size_t place = 0; place < batch.parameters.size(); ++place) {
    const auto found = factors.find(batch.parameters[place]);
    if (found == factors.end()) continue;
    const at::Tensor masters = batch.part(wire::kMaster, place, place + 1);
    masters.mul_(found->second.view({masters.size(0), masters.size(1), 1}));
  }
}

}  // namespace dmuon::optim
