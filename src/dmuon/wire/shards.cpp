#include "dmuon/wire/shards.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::wire {

using core::LeafIndex;
using core::ParameterIndex;
using core::Slot;

namespace {

constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;

at::Tensor part_of(const at::Tensor& flat, const layout::Segment& part, std::int64_t origin = 0) {
  return flat.narrow(0, part.size() == 0 ? 0 : part.begin - origin, part.size());
}

// Members of a group but this one, beginning after it, so that not all send to the first.
std::vector<int> others(const Group& group) {
  std::vector<int> members;
  for (int i = 1; i < group.size(); ++i) members.push_back((group.rank() + i) % group.size());
  return members;
}

}  // namespace

// Which elements of a parameter the ranks of the mesh have; counted in the parameter.
class Shards::Cut {
 public:
  // `within` of the leaf at place `place` of those that were named.
  Cut(const Shards* shards, LeafIndex leaf, std::size_t place, ParameterIndex parameter,
      layout::Segment within)
      : shards_(shards), leaf_(leaf), place_(place), parameter_(parameter), within_(within) {}

  std::size_t place() const { return place_; }
  LeafIndex leaf() const { return leaf_; }
  ParameterIndex parameter() const { return parameter_; }
  bool begins_leaf() const { return within_.begin == 0; }
  // What its messages are called: each has a name of its own between two ranks.
  std::string described(const std::string& name) const {
    return core::message("shards of ", name, " of parameter ", parameter_.value());
  }

  int owners_node() const { return owner().value() / members(); }
  int owners_column() const { return owner().value() % members(); }

  layout::Segment shard(int node, int member) const {
    const layout::Segment whole = whole_shard(node, member);
    return {std::clamp(whole.begin, within_.begin, within_.end) - within_.begin,
            std::clamp(whole.end, within_.begin, within_.end) - within_.begin};
  }

  // The same in the leaf's shard.
  layout::Segment in_shard(int node, int member, const layout::Segment& part) const {
    const std::int64_t origin = whole_shard(node, member).begin - within_.begin;
    return {part.begin - origin, part.end - origin};
  }

  // What the ranks of a node have together, which is one range.
  layout::Segment of_node(int node) const {
    layout::Segment whole = shard(node, 0);
    for (int member = 1; member < members(); ++member) {
      const layout::Segment part = shard(node, member);
      whole = {std::min(whole.begin, part.begin), std::max(whole.end, part.end)};
    }
    return whole;
  }

  // Of equal shards one counts, on the owner's node.
  bool counts(int node) const { return shards_->num_chunks_ > members() || node == owners_node(); }
  layout::Segment counted(int node, int member) const {
    return counts(node) && member < shards_->num_chunks_ ? shard(node, member) : layout::Segment{};
  }

 private:
  Slot owner() const { return shards_->parameters_[parameter_].owner; }
  int members() const { return shards_->mesh_->shape().num_shards; }
  layout::Segment whole_shard(int node, int member) const {
    return shards_->shard_of(leaf_, Slot(node * members() + member));
  }

  const Shards* shards_;
  LeafIndex leaf_;
  std::size_t place_;
  ParameterIndex parameter_;
  layout::Segment within_;
};

layout::Segment Shards::shard_of(LeafIndex leaf, Slot slot) const {
  const std::vector<std::int64_t>& sizes = leaves_[leaf].sizes;
  const std::int64_t rows = sizes[0];
  const std::int64_t chunk = (rows + num_chunks_ - 1) / num_chunks_;
  const std::int64_t row = c10::multiply_integers(sizes) / rows;
  const std::int64_t begin = std::min(rows, chunk * (slot.value() % num_chunks_));
  return {begin * row, std::min(rows, begin + chunk) * row};
}

// In order, in pieces of some size; a larger parameter is one by itself.
std::vector<Shards::Piece> Shards::pieces_of(const std::vector<LeafIndex>& which) const {
  std::vector<Piece> pieces;
  std::int64_t elements = kPieceElements;
  for (std::size_t place = 0; place < which.size(); ++place) {
    std::int64_t end = 0;
    for (const ParameterIndex parameter : leaves_.at(which[place]).parameters) {
      const std::int64_t more = parameters_[parameter].num_elements();
      if (elements + more > kPieceElements) {
        pieces.emplace_back();
        elements = 0;
      }
      const std::int64_t begin = std::exchange(end, end + more);
      pieces.back().emplace_back(this, which[place], place, parameter, layout::Segment{begin, end});
      elements += more;
    }
  }
  return pieces;
}

// Of an owner's column: what this node has of the parameter.
at::Tensor Shards::send_between_nodes(const Cut& cut, const std::string& name, at::ScalarType dtype,
                                      std::vector<Pending>* messages) const {
  const int node = mesh_->column().rank();
  const std::string what = cut.described(name);
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
  std::vector<Pending> messages;  // under way
  for (const Piece& piece : pieces_of(which)) {
    std::vector<at::Tensor> of_node;  // at the column members; elsewhere undefined
    for (const Cut& cut : piece) {
      of_node.emplace_back();
      if (cut.owners_column() == here)
        of_node.back() = send_between_nodes(cut, name, dtype, &messages);
    }
    wait_all(std::exchange(messages, {}));
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const Cut& cut = piece[i];
      const std::string what = cut.described(name);
      if (cut.begins_leaf())
        shards.push_back(at::empty(
            {shard_of(cut.leaf(), Slot(node * mesh_->shape().num_shards + here)).size()}, options));
      const layout::Segment mine = cut.shard(node, here);
      at::Tensor target = part_of(shards.back(), cut.in_shard(node, here, mine));
      if (cut.owners_column() != here) {
        messages.push_back(mesh_->row().receive(target, cut.owners_column(), what));
        continue;
      }
      const std::int64_t origin = cut.of_node(node).begin;
      for (const int other : others(mesh_->row()))
        messages.push_back(
            mesh_->row().send(part_of(of_node[i], cut.shard(node, other), origin), other, what));
      target.copy_(part_of(of_node[i], mine, origin));
    }
    wait_all(std::exchange(messages, {}));
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
  std::vector<Pending> messages;  // under way
  for (const Piece& piece : pieces_of(which)) {
    std::vector<at::Tensor> of_node;  // at the column members; at owners a part of their tensor
    for (const Cut& cut : piece) {
      const std::string what = cut.described(name);
      const layout::Segment counted = cut.counted(node, here);
      const at::Tensor mine = part_of(shards[cut.place()], cut.in_shard(node, here, counted))
                                  .to(options.device(), at::kFloat);
      of_node.emplace_back();
      if (cut.owners_column() != here) {
        messages.push_back(mesh_->row().send(mine, cut.owners_column(), what));
        continue;
      }
      const layout::Segment whole = cut.counts(node) ? cut.of_node(node) : layout::Segment{};
      of_node.back() = owned_.owns(cut.parameter())
                           ? part_of(owned_.of(cut.parameter(), name).view({-1}), whole)
                           : at::empty({whole.size()}, options);
      for (const int other : others(mesh_->row()))
        messages.push_back(mesh_->row().receive(
            part_of(of_node.back(), cut.counted(node, other), whole.begin), other, what));
      part_of(of_node.back(), counted, whole.begin).copy_(mine);
    }
    wait_all(std::exchange(messages, {}));
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const Cut& cut = piece[i];
      const std::string what = cut.described(name);
      if (cut.owners_column() != here) continue;
      if (!owned_.owns(cut.parameter())) {
        messages.push_back(mesh_->column().send(of_node[i], cut.owners_node(), what));
        continue;
      }
      const at::Tensor own = owned_.of(cut.parameter(), name).view({-1});
      for (const int other : others(mesh_->column())) {
        if (cut.counts(other))
          messages.push_back(
              mesh_->column().receive(part_of(own, cut.of_node(other)), other, what));
      }
    }
    wait_all(std::exchange(messages, {}));
  }
}

}  // namespace dmuon::wire
