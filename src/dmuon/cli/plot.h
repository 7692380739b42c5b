#pragma once

#include <string>
#include <string_view>

#include "dmuon/plan/plan.h"

namespace dmuon::cli {

/// A picture of the plan as one self-contained SVG document: what it takes, the predicted time of
/// every owner by shape beside the bound that no plan is below, and which slot of the mesh owns
/// what. Small meshes show the first matrices of every slot, as the paper's fig:weight_layout does,
/// others a map of the loads. Above 1024 owners, or rows and columns of the map that the page has
/// no room for, neighbours share a mark, which shows the slowest of them.
/// @param plan  complete; one without matrices, or whose times are all 0, is drawn as well.
/// @param title any text.
/// @throws InvalidArgument unless the plan's costs have a time for each of its batches.
/// Deterministic.
std::string svg(const plan::Plan& plan, std::string_view title);

}  // namespace dmuon::cli
