#include "dmuon/wire/shards.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/wire/arrival.h"

namespace dmuon::wire {

using core::LeafIndex;
using core::ParameterIndex;
using core::Slot;

namespace {

constexpr const char* kBetweenNodes = ", between nodes";
constexpr const char* kInsideNodes = ", inside nodes";

at::Tensor part_of(const at::Tensor& flat, const layout::Segment& part, std::int64_t origin = 0) {
  return flat.narrow(0, part.size() == 0 ? 0 : part.begin - origin, part.size());
}

// Returns the other members of a group in ring order, so that not all send to the first one.
std::vector<int> others(const Group& group) {
  std::vector<int> members;
  for (int i = 1; i < group.size(); ++i) members.push_back((group.rank() + i) % group.size());
  return members;
}

}  // namespace

// The elements of a parameter's tensor that each rank of the mesh has, counted in the parameter.
class Shards::Cut {
 public:
  // The parameter is `within` of a leaf's tensor, which has `rows` rows of `row` elements. `place`
  // is the leaf's place in the caller's list.
  Cut(const Shards* shards, const std::string& name, std::size_t place, std::int64_t rows,
      std::int64_t row, ParameterIndex parameter, layout::Segment within)
      : shards_(shards),
        name_(name),
        place_(place),
        rows_(rows),
        row_(row),
        parameter_(parameter),
        within_(within) {}

  std::size_t place() const { return place_; }
  ParameterIndex parameter() const { return parameter_; }
  // Names the parameter's messages. Each has a name of its own between two ranks.
  std::string described() const {
    return core::message("shards of ", name_, " of parameter ", parameter_.value());
  }

  int owners_node() const { return shape().member_of(owner(), layout::Axis::kColumn); }
  int owners_column() const { return shape().member_of(owner(), layout::Axis::kRow); }

  layout::Segment shard(int node, int member) const {
    const layout::Segment whole = leafs_shard(node, member);
    return {std::clamp(whole.begin, within_.begin, within_.end) - within_.begin,
            std::clamp(whole.end, within_.begin, within_.end) - within_.begin};
  }

  // The rank's shard of the leaf, counted in the leaf.
  layout::Segment leafs_shard(int node, int member) const {
    const Slot slot = shape().slot_at(core::Replicate(node), core::Shard(member));
    const std::int64_t chunk = (rows_ + shards_->num_chunks_ - 1) / shards_->num_chunks_;
    const std::int64_t begin = std::min(rows_, chunk * (slot.value() % shards_->num_chunks_));
    return {begin * row_, std::min(rows_, begin + chunk) * row_};
  }

  // Counts `part` of the parameter from the beginning of the rank's shard of the leaf.
  layout::Segment in_shard(int node, int member, const layout::Segment& part) const {
    const std::int64_t origin = leafs_shard(node, member).begin - within_.begin;
    return {part.begin - origin, part.end - origin};
  }

  // The elements that the ranks of a node have together: one range.
  layout::Segment of_node(int node) const {
    layout::Segment whole = shard(node, 0);
    for (int member = 1; member < shape().num_shards; ++member) {
      const layout::Segment part = shard(node, member);
      whole = {std::min(whole.begin, part.begin), std::max(whole.end, part.end)};
    }
    return whole;
  }

  // If every node has all chunks, only the shards of the owner's node count.
  bool counts(int node) const {
    return shards_->num_chunks_ > shape().num_shards || node == owners_node();
  }
  layout::Segment counted(int node, int member) const {
    return counts(node) && member < shards_->num_chunks_ ? shard(node, member) : layout::Segment{};
  }

 private:
  Slot owner() const { return shards_->parameters_[parameter_].owner; }
  layout::Mesh shape() const { return shards_->mesh_->shape(); }

  const Shards* shards_;
  const std::string& name_;
  std::size_t place_;
  std::int64_t rows_;
  std::int64_t row_;
  ParameterIndex parameter_;
  layout::Segment within_;
};

// Returns the parameters in order, in pieces of at most kPieceElements or one larger parameter.
std::vector<Shards::Piece> Shards::pieces_of(const std::vector<LeafIndex>& which,
                                             const std::string& name) const {
  std::vector<Piece> pieces;
  std::int64_t elements = 0;
  for (std::size_t place = 0; place < which.size(); ++place) {
    const std::vector<Owned::Part> parts = owned_.parts_of(leaves_.at(which[place]), name);
    const std::int64_t rows = owned_.rows_of(leaves_[which[place]], name);
    const std::int64_t all = parts.back().elements.end;
    for (const auto& [parameter, within] : parts) {
      if (pieces.empty() || elements + within.size() > kPieceElements) {
        pieces.emplace_back();
        elements = 0;
      }
      pieces.back().emplace_back(this, name, place, rows, all / rows, parameter, within);
      elements += within.size();
    }
  }
  return pieces;
}

// Issues a piece's messages of one stage as one launch, and waits for them.
void Shards::send(const Piece& piece, const char* stage, Group* group,
                  const std::function<void(std::size_t, Messages*)>& issue) const {
  const std::string what = piece.front().described() + stage;
  Messages messages = group->together(what, [&] {
    Messages issued;
    for (std::size_t i = 0; i < piece.size(); ++i) issue(i, &issued);
    return issued;
  });
  await_arrival(mesh_, owned_.pool()->device(), std::move(messages), what);
}

// Sends each node's elements along the owner's column. Returns the elements of this node.
at::Tensor Shards::send_between_nodes(const Cut& cut, const std::string& name, at::ScalarType dtype,
                                      Messages* messages) const {
  const int node = mesh_->column().rank();
  const std::string what = cut.described();
  if (!owned_.owns(cut.parameter())) {
    const auto options = at::TensorOptions().dtype(dtype).device(owned_.pool()->device());
    at::Tensor arriving = at::empty({cut.of_node(node).size()}, options);
    messages->push_back(mesh_->column().receive(arriving, cut.owners_node(), what));
    return arriving;
  }
  const at::Tensor whole = owned_.of(cut.parameter(), name).view({-1}).to(dtype);
  for (const int other : others(mesh_->column()))
    messages->push_back(mesh_->column().send(part_of(whole, cut.of_node(other)), other, what));
  return part_of(whole, cut.of_node(node));
}

std::vector<at::Tensor> Shards::give(const std::vector<LeafIndex>& which, const std::string& name,
                                     at::ScalarType dtype) const {
  owned_.require_name(name);
  const auto options = at::TensorOptions().dtype(dtype).device(owned_.pool()->device());
  const int node = mesh_->column().rank();
  const int here = mesh_->row().rank();
  std::vector<at::Tensor> shards;
  for (const Piece& piece : pieces_of(which, name)) {
    std::vector<at::Tensor> of_node(piece.size());  // at the column members; elsewhere undefined
    send(piece, kBetweenNodes, &mesh_->column(), [&](std::size_t i, Messages* messages) {
      if (piece[i].owners_column() == here)
        of_node[i] = send_between_nodes(piece[i], name, dtype, messages);
    });
    send(piece, kInsideNodes, &mesh_->row(), [&](std::size_t i, Messages* messages) {
      const Cut& cut = piece[i];
      const std::string what = cut.described();
      if (shards.size() == cut.place())  // the leaf's first; the parameter may be empty
        shards.push_back(at::empty({cut.leafs_shard(node, here).size()}, options));
      const layout::Segment mine = cut.shard(node, here);
      at::Tensor target = part_of(shards.back(), cut.in_shard(node, here, mine));
      if (cut.owners_column() != here)
        return messages->push_back(mesh_->row().receive(target, cut.owners_column(), what));
      const std::int64_t origin = cut.of_node(node).begin;
      for (const int other : others(mesh_->row()))
        messages->push_back(
            mesh_->row().send(part_of(of_node[i], cut.shard(node, other), origin), other, what));
      target.copy_(part_of(of_node[i], mine, origin));
    });
  }
  return shards;
}

void Shards::take(const std::vector<LeafIndex>& which, const std::string& name,
                  const std::vector<at::Tensor>& shards) const {
  owned_.require_name(name);
  core::invariant(shards.size() == which.size(), "Shards::take: expected ", which.size(),
                  " shards, got ", shards.size());
  const auto options = at::TensorOptions().dtype(at::kFloat).device(owned_.pool()->device());
  const int node = mesh_->column().rank();
  const int here = mesh_->row().rank();
  for (const Piece& piece : pieces_of(which, name)) {
    std::vector<at::Tensor> of_node(piece.size());  // at column members; at owners in their tensor
    std::vector<at::Tensor> mine(piece.size());
    send(piece, kInsideNodes, &mesh_->row(), [&](std::size_t i, Messages* messages) {
      const Cut& cut = piece[i];
      const std::string what = cut.described();
      const layout::Segment counted = cut.counted(node, here);
      mine[i] = part_of(shards[cut.place()], cut.in_shard(node, here, counted))
                    .to(options.device(), at::kFloat);
      if (cut.owners_column() != here)
        return messages->push_back(mesh_->row().send(mine[i], cut.owners_column(), what));
      const layout::Segment whole = cut.counts(node) ? cut.of_node(node) : layout::Segment{};
      of_node[i] = owned_.owns(cut.parameter())
                       ? part_of(owned_.of(cut.parameter(), name).view({-1}), whole)
                       : at::empty({whole.size()}, options);
      for (const int other : others(mesh_->row()))
        messages->push_back(mesh_->row().receive(
            part_of(of_node[i], cut.counted(node, other), whole.begin), other, what));
      part_of(of_node[i], counted, whole.begin).copy_(mine[i]);
    });
    send(piece, kBetweenNodes, &mesh_->column(), [&](std::size_t i, Messages* messages) {
      const Cut& cut = piece[i];
      const std::string what = cut.described();
      if (cut.owners_column() != here) return;
      if (!owned_.owns(cut.parameter()))
        return messages->push_back(mesh_->column().send(of_node[i], cut.owners_node(), what));
      const at::Tensor own = owned_.of(cut.parameter(), name).view({-1});
      for (const int other : others(mesh_->column())) {
        if (cut.counts(other))
          messages->push_back(
              mesh_->column().receive(part_of(own, cut.of_node(other)), other, what));
      }
    });
  }
}

}  // namespace dmuon::wire
