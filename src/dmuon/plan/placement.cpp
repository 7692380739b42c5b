#include "dmuon/plan/placement.h"

#include <array>
#include <map>

#include "dmuon/core/error.h"
#include "dmuon/plan/layout.h"

namespace dmuon::plan {
namespace {

// The columns and rows that the last matrices and the units took.
class Occupancy {
 public:
  explicit Occupancy(Mesh mesh)
      : mesh_(mesh), recent_columns_(mesh.num_shards, 0), recent_rows_(mesh.num_replicates, 0) {}

  void take(int unit, Slot slot) {
    ++columns_of(unit)[slot.shard];
    ++recent_columns_[slot.shard];
    ++recent_rows_[slot.replicate];
    window_.push_back(slot);
    // Of any G consecutive matrices, no two should share a column, so G - 1 predecessors count.
    if (window_.size() - first_ >= static_cast<std::size_t>(mesh_.num_shards)) {
      --recent_columns_[window_[first_].shard];
      --recent_rows_[window_[first_].replicate];
      ++first_;
    }
  }

  /// @return [num_shards] matrices of the unit on each column.
  std::vector<int>& columns_of(int unit) {
    return units_.try_emplace(unit, mesh_.num_shards, 0).first->second;
  }
  int in_window(int shard) const { return recent_columns_[shard]; }
  int on_row(int replicate) const { return recent_rows_[replicate]; }

 private:
  Mesh mesh_;
  std::vector<int> recent_columns_;
  std::vector<int> recent_rows_;
  std::map<int, std::vector<int>> units_;
  std::vector<Slot> window_;
  std::size_t first_ = 0;
};

}  // namespace

// Matrices in execution order; each takes, among the slots that still want its shape, the one whose
// column was used least by its unit, then by its G - 1 predecessors; then its ideal slot; then
// the column with most left to come (or the end of the order would be left with few columns); then
// the node used least of late; then the lowest index.
std::vector<int> place(const Inventory& inventory, const ShapeGroups& groups, Counts counts,
                       Mesh mesh) {
  const int num_slots = mesh.num_slots();
  std::vector<int> column_stock(mesh.num_shards, 0);
  for (int s = 0; s < static_cast<int>(groups.shapes.size()); ++s) {
    for (int t = 0; t < num_slots; ++t) column_stock[slot_at(t, mesh).shard] += counts.at(s, t);
  }
  Occupancy occupancy(mesh);
  std::vector<int> owner;
  owner.reserve(inventory.size());
  for (std::size_t w = 0; w < inventory.size(); ++w) {
    const int shape = groups.shape_of[w];
    const std::vector<int>& unit_columns = occupancy.columns_of(inventory[w].unit);
    const int ideal = slot_index(layout_slot(static_cast<std::int64_t>(w), mesh), mesh);
    int chosen = -1;
    std::array<int, 5> chosen_key{};
    for (int t = 0; t < num_slots; ++t) {
      if (counts.at(shape, t) == 0) continue;
      const Slot slot = slot_at(t, mesh);
      const std::array<int, 5> key = {unit_columns[slot.shard], occupancy.in_window(slot.shard),
                                      t == ideal ? 0 : 1, -column_stock[slot.shard],
                                      occupancy.on_row(slot.replicate)};
      if (chosen < 0 || key < chosen_key) {
        chosen = t;
        chosen_key = key;
      }
    }
    core::invariant(chosen >= 0, "place: no slot is left for matrix '", inventory[w].name, "'");
    const Slot slot = slot_at(chosen, mesh);
    --counts.at(shape, chosen);
    --column_stock[slot.shard];
    occupancy.take(inventory[w].unit, slot);
    owner.push_back(chosen);
  }
  return owner;
}

}  // namespace dmuon::plan
