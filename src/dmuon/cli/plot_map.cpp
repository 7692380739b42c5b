#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include "dmuon/cli/plot_parts.h"

namespace dmuon::cli {
namespace {

constexpr int kMaxColumnsBeside = 64;
constexpr double kWidthBeside = 160;
constexpr double kGapBeside = 150;     // to the bars: the bound's label and the numbers of nodes
constexpr double kHeadingWidth = 210;  // with room for the scale, which is narrower
constexpr int kScaleSteps = 32;        // of colour
constexpr double kScaleStepWidth = 5;
constexpr double kMaxCell = 20;
constexpr double kHeightBelow = 240;

// Of no load and of the makespan.
constexpr std::array<int, 3> kLight = {0xee, 0xf3, 0xf9};
constexpr std::array<int, 3> kDark = {0x12, 0x4c, 0x86};
constexpr std::string_view kHexDigits = "0123456789abcdef";

// The cells of the map: each is a slot, or a block of slots where there are too many.
struct Raster {
  int rows = 0;
  int columns = 0;
  int nodes_per_row = 1;
  int shards_per_column = 1;
  double cell_width = 1;
  double cell_height = 1;
};

Raster raster_for(const plan::Mesh& mesh, double width, double height) {
  Raster raster;
  const auto divide = [](int count, double room) {
    return static_cast<int>(std::ceil(count / std::floor(room)));
  };
  raster.nodes_per_row = divide(mesh.num_replicates, height);
  raster.shards_per_column = divide(mesh.num_shards, width);
  raster.rows = (mesh.num_replicates + raster.nodes_per_row - 1) / raster.nodes_per_row;
  raster.columns = (mesh.num_shards + raster.shards_per_column - 1) / raster.shards_per_column;
  raster.cell_width = std::min(kMaxCell, std::floor(width / raster.columns));
  raster.cell_height = std::min(kMaxCell, std::floor(height / raster.rows));
  return raster;
}

// From near white to dark blue.
std::string shade(double share) {
  std::string colour = "#";
  for (std::size_t i = 0; i < 3; ++i) {
    const auto value =
        static_cast<std::size_t>(std::lround(kLight[i] + share * (kDark[i] - kLight[i])));
    colour += kHexDigits[value / 16];
    colour += kHexDigits[value % 16];
  }
  return colour;
}

double share_of(const plan::Plan& plan, int owner) {
  if (plan.makespan_ns() <= 0) return 0;
  return static_cast<double>(load(plan, owner)) / static_cast<double>(plan.makespan_ns());
}

// The slowest rank of all slots that the cell stands for.
int slowest_in(const plan::Plan& plan, const Raster& raster, int row, int column) {
  const plan::Mesh& mesh = plan.mesh;
  const int first_node = row * raster.nodes_per_row;
  const int last_node = std::min(mesh.num_replicates, first_node + raster.nodes_per_row);
  const int first_shard = column * raster.shards_per_column;
  const int last_shard = std::min(mesh.num_shards, first_shard + raster.shards_per_column);
  int best = slot_index({first_node, first_shard}, mesh) * mesh.tensor_parallel;
  for (int node = first_node; node < last_node; ++node) {
    const int first = slot_index({node, first_shard}, mesh) * mesh.tensor_parallel;
    const int last = first + (last_shard - first_shard) * mesh.tensor_parallel;
    const int owner = slowest(plan, first, last);
    if (load(plan, owner) > load(plan, best)) best = owner;
  }
  return best;
}

void draw_cells(Drawing& drawing, const plan::Plan& plan, const Raster& raster, const Area& area) {
  const double gap_x = raster.cell_width >= 4 ? 1 : 0;
  const double gap_y = raster.cell_height >= 4 ? 1 : 0;
  drawing.open_group("map");
  for (int row = 0; row < raster.rows; ++row) {
    for (int column = 0; column < raster.columns; ++column) {
      const int owner = slowest_in(plan, raster, row, column);
      drawing.rect(area.left + column * raster.cell_width, area.top + row * raster.cell_height,
                   raster.cell_width - gap_x, raster.cell_height - gap_y,
                   shade(share_of(plan, owner)),
                   "node " + std::to_string(plan.mesh.replicate_of(owner)) + ", shard " +
                       std::to_string(plan.mesh.shard_of(owner)) + ", owner " +
                       std::to_string(owner) + ": " + milliseconds(load(plan, owner)) + " ms");
    }
  }
  drawing.close_group();
}

void draw_map_axes(Drawing& drawing, const Raster& raster, const Area& area) {
  const int column_step = label_step(raster.columns, raster.cell_width, 18);
  for (int column = 0; column < raster.columns; column += column_step) {
    drawing.text(area.left + (column + 0.5) * raster.cell_width, area.top - 6,
                 std::to_string(column * raster.shards_per_column), kTick);
  }
  TextStyle style = kTick;
  style.anchor = "end";
  const int row_step = label_step(raster.rows, raster.cell_height, 13);
  for (int row = 0; row < raster.rows; row += row_step) {
    drawing.text(area.left - 6, area.top + (row + 0.5) * raster.cell_height + 4,
                 std::to_string(row * raster.nodes_per_row), style);
  }
  drawing.text(area.left, area.top - 24, "shard", {.fill = kPaleInk});
  drawing.text(area.left - 40, area.top + area.height / 2, "node",
               {.anchor = "middle", .fill = kPaleInk, .turned = true});
}

void draw_scale(Drawing& drawing, const plan::Plan& plan, double left, double top) {
  for (int i = 0; i < kScaleSteps; ++i) {
    drawing.rect(left + i * kScaleStepWidth, top, kScaleStepWidth, 10,
                 shade(i / (kScaleSteps - 1.0)));
  }
  TextStyle style = kTick;
  style.anchor = "start";
  drawing.text(left, top + 24, "0", style);
  style.anchor = "end";
  drawing.text(left + kScaleSteps * kScaleStepWidth, top + 24,
               milliseconds(plan.makespan_ns()) + " ms", style);
}

bool map_fits_beside(const plan::Mesh& mesh) {
  return mesh.num_replicates > 1 && mesh.num_shards <= kMaxColumnsBeside;
}

}  // namespace

Area draw_load_map(Drawing& drawing, const plan::Plan& plan, const Area& bars) {
  const bool beside = map_fits_beside(plan.mesh);
  const Raster raster = beside ? raster_for(plan.mesh, kWidthBeside, kPlotHeight)
                               : raster_for(plan.mesh, kPlotWidth, kHeightBelow);
  const double width = raster.cell_width * raster.columns;
  const double height = raster.cell_height * raster.rows;
  const Area area = beside ? Area{bars.right() + kGapBeside, bars.top, width, height}
                           : Area{kPlotLeft, bars.bottom() + 130, width, height};
  const double heading_left = beside ? area.left - 46 : kMargin;
  drawing.text(heading_left, area.top - 50,
               plan.mesh.tensor_parallel > 1 ? "Slowest rank of every slot" : "Load of every slot",
               kHeading);
  draw_cells(drawing, plan, raster, area);
  draw_map_axes(drawing, raster, area);
  draw_scale(drawing, plan, area.left, area.bottom() + 16);
  const double right = std::max(area.right(), heading_left + kHeadingWidth);
  return {heading_left, area.top - 62, right - heading_left, area.height + 100};
}

}  // namespace dmuon::cli
