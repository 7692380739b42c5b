#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/cli/plot_parts.h"
#include "dmuon/cli/plot_stacks.h"

namespace dmuon::cli {
namespace {

using plan::Nanoseconds;

constexpr int kMaxLabelledBars = 32;  // each with its own label; beyond, about 16 labels
constexpr double kLegendRow = 20;
constexpr double kSwatch = 12;
constexpr Nanoseconds kMillisecond = 1'000'000;
constexpr double kMaxBarWidth = 72;

// Okabe and Ito's colours for the colour-blind and some of Tol's, ordered so that neighbours differ
// in lightness too. The last is for what is "other".
constexpr std::array<std::string_view, kMaxLayers> kColours = {
    "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#882255", "#f0e442", "#d55e00",
    "#cc79a7", "#332288", "#ddcc77", "#117733", "#a8dde0", "#7a4b2a", "#9a9fa6"};

// In equal columns, the first row first. Returns where it ends.
double draw_legend(Drawing& drawing, const std::vector<Layer>& layers, double top) {
  std::vector<std::string> labels;
  std::size_t longest = 1;
  for (const Layer& layer : layers) {
    labels.push_back(layer.label + " (" + std::to_string(layer.num_matrices) + ")");
    longest = std::max(longest, labels.back().size());
  }
  const double pitch = kSwatch + 6 + 12 * kCharacterWidth * static_cast<double>(longest) + 14;
  const std::size_t columns =
      std::max<std::size_t>(1, static_cast<std::size_t>((kPlotWidth + 60) / pitch));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const std::size_t row = i / columns;
    const double x = kPlotLeft + pitch * static_cast<double>(i % columns);
    const double y = top + kLegendRow * static_cast<double>(row);
    drawing.rect(x, y, kSwatch, kSwatch, kColours[i], {}, 2);
    drawing.text(x + kSwatch + 6, y + 10.5, labels[i]);
  }
  const std::size_t rows = (labels.size() + columns - 1) / columns;
  return top + kLegendRow * static_cast<double>(rows);
}

// Whole nanoseconds, so that ticks are where their labels say.
struct Scale {
  Nanoseconds step = 1;  // between ticks: 1, 2 or 5 times a power of ten
  int decimals = 0;      // of a tick in milliseconds
  Nanoseconds top = 1;

  double pixels(Nanoseconds ns) const {
    return kPlotHeight * static_cast<double>(ns) / static_cast<double>(top);
  }
};

// For about six ticks up to just above `largest`.
Scale scale_for(Nanoseconds largest) {
  if (largest <= 0) largest = kMillisecond;
  Scale scale;
  Nanoseconds power = 1;
  for (int i = 0; scale.step < largest / 6; ++i) {
    if (i % 3 == 2) power *= 10;
    scale.step = power * (i % 3 == 0 ? 2 : i % 3 == 1 ? 5 : 1);
  }
  for (Nanoseconds unit = kMillisecond; unit > scale.step; unit /= 10) ++scale.decimals;
  scale.top = (largest / scale.step + 1) * scale.step;
  return scale;
}

void draw_time_axis(Drawing& drawing, const Scale& scale, const Area& area) {
  for (Nanoseconds tick = 0; tick <= scale.top; tick += scale.step) {
    const double y = area.bottom() - scale.pixels(tick);
    drawing.line(area.left, y, area.right(), y, tick == 0 ? kPaleInk : "#e1e5ea");
    TextStyle style = kTick;
    style.anchor = "end";
    drawing.text(area.left - 8, y + 4, fixed(static_cast<double>(tick) / 1e6, scale.decimals),
                 style);
  }
  drawing.text(kMargin - 4, area.top + area.height / 2, "predicted time, ms",
               {.anchor = "middle", .turned = true});
}

void draw_owner_axis(Drawing& drawing, const Stacks& stacks, double pitch, const Area& area) {
  const int count = static_cast<int>(stacks.owners.size());
  const double room = count <= kMaxLabelledBars ? 0 : area.width / 17;
  const int step = label_step(count, pitch, room);
  for (int bar = 0; bar < count; bar += step) {
    drawing.text(area.left + (bar + 0.5) * pitch, area.bottom() + 17,
                 std::to_string(bar * stacks.owners_per_bar), kTick);
  }
  const std::string merged =
      stacks.owners_per_bar == 1
          ? "owner"
          : "owner (a bar is the slowest of " + std::to_string(stacks.owners_per_bar) + ")";
  drawing.text(area.left + area.width / 2, area.bottom() + 38, merged, {.anchor = "middle"});
}

void draw_bar(Drawing& drawing, const Stacks& stacks, std::size_t bar, const Scale& scale,
              const Area& area) {
  // A white line between segments, where it takes little of them.
  const double line = area.width >= 6 ? 0.8 : 0;
  Nanoseconds below = 0;
  drawing.open_group("bar");
  for (std::size_t i = 0; i < stacks.layers.size(); ++i) {
    const Segment& segment = stacks.segments[bar][i];
    if (segment.num_matrices == 0) continue;
    const double y = area.bottom() - scale.pixels(below + segment.ns);
    const double height = scale.pixels(segment.ns);
    drawing.rect(area.left, y, area.width, height > 3 ? height - line : height, kColours[i],
                 "owner " + std::to_string(stacks.owners[bar]) + ", " + stacks.layers[i].label +
                     ": " + std::to_string(segment.num_matrices) +
                     (segment.num_matrices == 1 ? " matrix, " : " matrices, ") +
                     milliseconds(segment.ns) + " ms");
    below += segment.ns;
  }
  drawing.close_group();
}

// Its label is right of the bars, where nothing is in the way.
void draw_bound(Drawing& drawing, Nanoseconds bound, const Scale& scale, const Area& area) {
  const double y = area.bottom() - scale.pixels(bound);
  drawing.open_group("bound");
  drawing.line(area.left, y, area.right() + 6, y, "#111111", 1.5, "7 4");
  drawing.text(area.right() + 10, y - 2, "bound", {.bold = true});
  drawing.text(area.right() + 10, y + 12, milliseconds(bound) + " ms");
  drawing.close_group();
}

}  // namespace

Area draw_bars(Drawing& drawing, const plan::Plan& plan, double top) {
  const Stacks stacks = stacks_of(plan);
  drawing.text(kMargin, top + 12, "Predicted time of every owner, by shape (matrices)", kHeading);
  const double legend_end = draw_legend(drawing, stacks.layers, top + 26);
  // Whole pixels: all bars are equally wide.
  const double pitch = std::floor(kPlotWidth / static_cast<double>(stacks.owners.size()));
  const double gap = pitch >= 8 ? std::round(pitch * 0.2) : pitch >= 3 ? 1 : 0;
  const double width = std::min(pitch - gap, kMaxBarWidth);
  const Area area = {kPlotLeft, legend_end + 16, pitch * static_cast<double>(stacks.owners.size()),
                     kPlotHeight};
  const Scale scale = scale_for(std::max(plan.makespan_ns(), plan.bound_ns()));
  draw_time_axis(drawing, scale, area);
  for (std::size_t bar = 0; bar < stacks.owners.size(); ++bar) {
    const double left =
        area.left + pitch * static_cast<double>(bar) + std::floor((pitch - width) / 2);
    draw_bar(drawing, stacks, bar, scale, {left, area.top, width, area.height});
  }
  draw_owner_axis(drawing, stacks, pitch, area);
  draw_bound(drawing, plan.bound_ns(), scale, area);
  return area;
}

}  // namespace dmuon::cli
