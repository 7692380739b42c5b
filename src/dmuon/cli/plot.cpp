#include "dmuon/cli/plot.h"

#include <algorithm>

#include "dmuon/cli/drawing.h"
#include "dmuon/cli/plot_parts.h"

namespace dmuon::cli {
namespace {

constexpr double kHeaderHeight = 128;
constexpr double kPageWidth = 1232;
constexpr double kAxisHeight = 44;  // below the bars, what draw_bars promises

std::string counted(std::size_t count, const std::string& one, const std::string& many) {
  return std::to_string(count) + " " + (count == 1 ? one : many);
}

std::string subject(const plan::Plan& plan) {
  const plan::Mesh& mesh = plan.mesh;
  std::string text = plan.strategy + " on a mesh of " + std::to_string(mesh.num_replicates) +
                     " x " + std::to_string(mesh.num_shards);
  if (mesh.tensor_parallel > 1) text += ", tensor parallel " + std::to_string(mesh.tensor_parallel);
  return text + ": " + counted(plan.inventory.size(), "matrix", "matrices") + " in " +
         counted(plan.batches.size(), "batch", "batches");
}

std::string figures(const plan::Plan& plan) {
  std::string text = "makespan " + milliseconds(plan.makespan_ns()) + " ms, bound " +
                     milliseconds(plan.bound_ns()) + " ms";
  if (plan.bound_ns() > 0) text += ", gap " + fixed(plan.gap() * 100, 2) + " %";
  return text;
}

void draw_header(Drawing& drawing, const plan::Plan& plan, std::string_view title) {
  const auto fit = [](std::string_view text, double size) {
    const double room = kPageWidth - 2 * kMargin;
    return shortened(text, static_cast<std::size_t>(room / (size * kCharacterWidth)));
  };
  drawing.text(kMargin, 44, fit(title, 22), {.size = 21, .bold = true});
  drawing.text(kMargin, 70, fit(subject(plan), 14), {.size = 14});
  drawing.text(kMargin, 91, figures(plan), {.size = 14, .bold = true});
  const std::string source = plan.costs.source.empty() ? "not named" : plan.costs.source;
  drawing.text(kMargin, 111, fit("costs: " + source, 12), {.size = 12, .fill = kPaleInk});
}

}  // namespace

std::string label(const plan::Shape& shape) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.cols) +
         (shape.tensor_parallel ? " over TP" : "");
}

plan::Nanoseconds load(const plan::Plan& plan, int owner) {
  const auto o = static_cast<std::size_t>(owner);
  return o < plan.loads_ns.size() ? plan.loads_ns[o] : 0;
}

int slowest(const plan::Plan& plan, int first, int last) {
  int best = first;
  for (int owner = first + 1; owner < last; ++owner) {
    if (load(plan, owner) > load(plan, best)) best = owner;
  }
  return best;
}

int label_step(int count, double pitch, double room) {
  int step = 1;
  while (step < count && step * pitch < room) step *= 2;
  return step;
}

std::string svg(const plan::Plan& plan, std::string_view title) {
  Drawing drawing;
  draw_header(drawing, plan, title);
  const Area bars = draw_bars(drawing, plan, kHeaderHeight);
  double bottom = bars.bottom() + kAxisHeight;
  double right = kPageWidth - kMargin;
  if (shows_matrices(plan.mesh)) {
    bottom = draw_matrices(drawing, plan, bottom + 30).bottom();
  } else {
    const Area map = draw_load_map(drawing, plan, bars);
    bottom = std::max(bottom, map.bottom());
    right = std::max(right, map.right());
  }
  return drawing.document(right + kMargin, bottom + kMargin, title);
}

}  // namespace dmuon::cli
