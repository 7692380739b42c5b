#pragma once

#include <string>

#include "dmuon/cli/drawing.h"
#include "dmuon/plan/plan.h"

namespace dmuon::cli {

/// Where something is on the page, in pixels.
struct Area {
  double left = 0;
  double top = 0;
  double width = 0;
  double height = 0;

  double right() const { return left + width; }
  double bottom() const { return top + height; }
};

inline constexpr double kMargin = 32;
inline constexpr double kPlotLeft = 84;  ///< leaves room for axis labels and "node 7"
inline constexpr double kPlotWidth = 1024;
inline constexpr double kPlotHeight = 340;

inline constexpr TextStyle kHeading = {.size = 14, .bold = true};
inline constexpr TextStyle kTick = {.size = 11, .anchor = "middle", .fill = kPaleInk};

/// What plan::to_string writes where the global locale is the classic one.
std::string label(const plan::Shape& shape);

/// Predicted time of an owner, 0 where the plan has none.
plan::Nanoseconds load(const plan::Plan& plan, int owner);

/// The slowest owner among [first, last).
int slowest(const plan::Plan& plan, int first, int last);

/// Every how manieth of `count` marks is labelled, `pitch` pixels apart, for labels to be `room`
/// pixels apart: a power of two, as the sides of meshes often are.
int label_step(int count, double pitch, double room);

/// A bar an owner, stacked by shape, with axes, bound and legend, from `top` on.
/// @return where the bars are; axis labels reach 44 pixels below.
Area draw_bars(Drawing& drawing, const plan::Plan& plan, double top);

/// Whether the matrices of each slot can be read, or only loads be shown.
bool shows_matrices(const plan::Mesh& mesh);

/// Rows are nodes, columns are shards, from `top` on.
/// @return the area of the cells.
Area draw_matrices(Drawing& drawing, const plan::Plan& plan, double top);

/// The same rows and columns, coloured by load, with the scale of colours. A narrow map is beside
/// the bars, a wide one below.
/// @return the area of all of it.
Area draw_load_map(Drawing& drawing, const plan::Plan& plan, const Area& bars);

}  // namespace dmuon::cli
