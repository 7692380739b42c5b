#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/cli/plot_parts.h"

namespace dmuon::cli {
namespace {

constexpr int kMaxNodes = 8;
constexpr int kMaxColumns = 16;  // of a grid with indices; two indices still fit side by side
constexpr double kMaxCellWidth = 256;
constexpr std::size_t kMaxChipsAcross = 8;
constexpr double kChipHeight = 17;
constexpr double kChipGap = 2;
constexpr double kCellGap = 4;
constexpr double kWideCell = 100;   // has room for the number of matrices and for air
constexpr double kCellHeader = 18;  // matrices and load, above the indices
constexpr double kCellFooter = 12;  // the bar of the load, below

// Pale, to be written upon; blocks that follow each other differ.
constexpr std::array<std::string_view, 8> kBlockColours = {
    "#a9d1ee", "#ffd596", "#a5dfc9", "#f4b9a7", "#dcc0e6", "#f4eda0", "#cfd4da", "#dfc3a0"};

// The same for all cells of a grid.
struct Cell {
  double width = 0;
  double height = 0;
  double padding = 0;
  double chip_width = 0;
  std::size_t chips_across = 1;
  std::size_t max_chips = 1;
};

// About four digits, for where there is little room: "177.6 ms".
std::string short_milliseconds(plan::Nanoseconds ns) {
  if (ns == 0) return "0 ms";
  const double ms = plan::milliseconds(ns);
  return fixed(ms, ms >= 1000 ? 0 : ms >= 100 ? 1 : ms >= 10 ? 2 : 3) + " ms";
}

// [slots] matrices in execution order.
std::vector<std::vector<int>> matrices_of_slots(const plan::Plan& plan) {
  std::vector<std::vector<int>> matrices(static_cast<std::size_t>(plan.mesh.num_slots()));
  for (std::size_t w = 0; w < plan.owner.size(); ++w) {
    const int slot = plan.mesh.slot_of(plan.owner[w]);
    matrices.at(static_cast<std::size_t>(slot)).push_back(static_cast<int>(w));
  }
  return matrices;
}

// Digits of the largest index among the first `num_shown` of every slot.
std::size_t digits_of(const std::vector<std::vector<int>>& matrices, std::size_t num_shown) {
  int largest = 10;  // chips of one digit would look lost
  for (const std::vector<int>& of_slot : matrices) {
    const std::size_t shown = std::min(num_shown, of_slot.size());
    if (shown > 0) largest = std::max(largest, of_slot[shown - 1]);
  }
  return std::to_string(largest).size();
}

// With more nodes there are fewer rows of indices in each, so that the page stays a page.
Cell cell_for(const plan::Plan& plan, const std::vector<std::vector<int>>& matrices) {
  std::size_t most = 1;
  for (const std::vector<int>& of_slot : matrices) most = std::max(most, of_slot.size());
  Cell cell;
  cell.width = std::min(kMaxCellWidth, std::floor(kPlotWidth / plan.mesh.num_shards));
  cell.padding = cell.width >= kWideCell ? 6 : 3;
  const auto rows_at_most =
      static_cast<std::size_t>(std::clamp(16 / plan.mesh.num_replicates, 1, 6));
  const std::size_t digits = digits_of(matrices, rows_at_most * kMaxChipsAcross);
  cell.chip_width = 6.6 * static_cast<double>(digits) + 6;
  const double room = cell.width - kCellGap - 2 * cell.padding + kChipGap;
  cell.chips_across = std::clamp<std::size_t>(
      static_cast<std::size_t>(room / (cell.chip_width + kChipGap)), 1, kMaxChipsAcross);
  const std::size_t rows =
      std::min(rows_at_most, (most + cell.chips_across - 1) / cell.chips_across);
  cell.max_chips = rows * cell.chips_across;
  cell.height = kCellHeader + kCellFooter + static_cast<double>(rows) * (kChipHeight + kChipGap);
  return cell;
}

void draw_chips(Drawing& drawing, const plan::Plan& plan, const std::vector<int>& matrices,
                const Cell& cell, double left, double top) {
  const bool all = matrices.size() <= cell.max_chips;
  const std::size_t shown = all ? matrices.size() : cell.max_chips - 1;
  const auto place = [&](std::size_t i) {
    const std::size_t row = i / cell.chips_across;
    const std::size_t column = i % cell.chips_across;
    return std::pair(left + static_cast<double>(column) * (cell.chip_width + kChipGap),
                     top + static_cast<double>(row) * (kChipHeight + kChipGap));
  };
  for (std::size_t i = 0; i < shown; ++i) {
    const auto [x, y] = place(i);
    const auto w = static_cast<std::size_t>(matrices[i]);
    const plan::Matrix& matrix = plan.inventory.at(w);
    const auto block = w / static_cast<std::size_t>(plan.mesh.num_shards);
    drawing.rect(
        x, y, cell.chip_width, kChipHeight, kBlockColours[block % kBlockColours.size()],
        matrix.name + ", " + label(matrix.shape()) + ", owner " + std::to_string(plan.owner[w]), 3);
    drawing.text(x + cell.chip_width / 2, y + 12.5, std::to_string(w),
                 {.size = 11, .anchor = "middle"});
  }
  if (all) return;
  const auto [x, y] = place(shown);
  drawing.text(x, y + 12.5, "+" + std::to_string(matrices.size() - shown),
               {.size = 10, .fill = kPaleInk});
}

void draw_cell(Drawing& drawing, const plan::Plan& plan, int slot, const std::vector<int>& matrices,
               const Cell& cell, const Area& area) {
  const int first = slot * plan.mesh.tensor_parallel;
  const plan::Nanoseconds ns = load(plan, slowest(plan, first, first + plan.mesh.tensor_parallel));
  const double share = plan.makespan_ns() > 0
                           ? static_cast<double>(ns) / static_cast<double>(plan.makespan_ns())
                           : 0;
  const double inner = area.width - 2 * cell.padding;
  drawing.open_group("slot");
  drawing.rect(area.left, area.top, area.width, area.height, "#f3f5f8", {}, 4);
  TextStyle small = {.size = 10, .fill = kPaleInk};
  if (cell.width >= kWideCell) {
    drawing.text(area.left + cell.padding, area.top + 12.5,
                 "owns " + std::to_string(matrices.size()), small);
  }
  small.anchor = "end";
  drawing.text(area.right() - cell.padding, area.top + 12.5, short_milliseconds(ns), small);
  draw_chips(drawing, plan, matrices, cell, area.left + cell.padding, area.top + kCellHeader);
  drawing.rect(area.left + cell.padding, area.bottom() - 8, inner, 3, "#dde2e8");
  drawing.rect(area.left + cell.padding, area.bottom() - 8, inner * share, 3, "#2f6fa7");
  drawing.close_group();
}

}  // namespace

bool shows_matrices(const plan::Mesh& mesh) {
  return mesh.num_replicates <= kMaxNodes && mesh.num_shards <= kMaxColumns;
}

Area draw_matrices(Drawing& drawing, const plan::Plan& plan, double top) {
  const plan::Mesh& mesh = plan.mesh;
  const std::vector<std::vector<int>> matrices = matrices_of_slots(plan);
  const Cell cell = cell_for(plan, matrices);
  drawing.text(kMargin, top + 12, "First matrices of every slot, by index in execution order",
               kHeading);
  std::string note = "Rows are nodes (replicates), columns are shards. ";
  if (mesh.num_shards > 1) {
    note += "Colours: blocks of " + std::to_string(mesh.num_shards) + " consecutive indices. ";
  }
  note += "Lines: load of the slot over the makespan";
  note += mesh.tensor_parallel > 1 ? ", of its slowest rank." : ".";
  drawing.text(kMargin, top + 31, note, {.fill = kPaleInk});
  const Area area = {kPlotLeft, top + 60, cell.width * mesh.num_shards,
                     cell.height * mesh.num_replicates + kCellGap * (mesh.num_replicates - 1)};
  for (int shard = 0; shard < mesh.num_shards; ++shard) {
    drawing.text(area.left + (shard + 0.5) * cell.width, area.top - 7,
                 "shard " + std::to_string(shard), kTick);
  }
  for (int slot = 0; slot < mesh.num_slots(); ++slot) {
    const auto [node, shard] = plan::slot_at(slot, mesh);
    const double y = area.top + node * (cell.height + kCellGap);
    if (shard == 0) {
      TextStyle style = kTick;
      style.anchor = "end";
      drawing.text(area.left - 8, y + cell.height / 2 + 4, "node " + std::to_string(node), style);
    }
    draw_cell(
        drawing, plan, slot, matrices[static_cast<std::size_t>(slot)], cell,
        {area.left + shard * cell.width + kCellGap / 2, y, cell.width - kCellGap, cell.height});
  }
  return area;
}

}  // namespace dmuon::cli
