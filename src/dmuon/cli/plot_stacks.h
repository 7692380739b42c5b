#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "dmuon/plan/plan.h"

namespace dmuon::cli {

inline constexpr int kMaxBars = 1024;          ///< as many fit on a page
inline constexpr std::size_t kMaxLayers = 14;  ///< as many colours can be told apart

/// A part of a bar: what one owner does of one layer.
struct Segment {
  plan::Nanoseconds ns = 0;
  int num_matrices = 0;
};

/// What has one colour: a shape, or all that are left of them.
struct Layer {
  std::string label;  ///< "3584 x 18944" or "other, 3 shapes"
  int num_shapes = 0;
  int num_matrices = 0;
};

/// The times of owners by shape, as stacked bars.
struct Stacks {
  int owners_per_bar = 1;
  std::vector<int> owners;                     ///< [bars] the slowest of those that share the bar
  std::vector<Layer> layers;                   ///< at most kMaxLayers, that of most time first
  std::vector<std::vector<Segment>> segments;  ///< [bars][layers]
};

/// @throws InvalidArgument unless the plan's costs have a time for each of its batches.
Stacks stacks_of(const plan::Plan& plan);

}  // namespace dmuon::cli
