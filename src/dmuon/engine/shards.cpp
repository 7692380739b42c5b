#include "dmuon/engine/shards.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

using core::ParameterIndex;
using core::Slot;

constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;

// In order, in pieces of some size; a larger parameter is one by itself.
std::vector<std::vector<ParameterIndex>> pieces_of(const Parameters& all,
                                                   const std::vector<ParameterIndex>& which) {
  std::vector<std::vector<ParameterIndex>> pieces;
  std::int64_t elements = kPieceElements;
  for (const ParameterIndex parameter : which) {
    const std::int64_t more = all.at(parameter).num_elements();
    if (elements + more > kPieceElements) {
      pieces.emplace_back();
      elements = 0;
    }
    pieces.back().push_back(parameter);
    elements += more;
  }
  return pieces;
}

// Which elements of a parameter the ranks of the mesh have.
class Cut {
 public:
  Cut(const SharedMesh& mesh, const Parameter& parameter, int num_chunks)
      : members_(mesh.num_shards()), parameter_(parameter), num_chunks_(num_chunks) {}

  int owners_node() const { return parameter_.owner.value() / members_; }
  int owners_column() const { return parameter_.owner.value() % members_; }

  Segment shard(int node, int member) const {
    return shard_of(parameter_, num_chunks_, Slot(node * members_ + member));
  }

  // What the ranks of a node have together, which is one range.
  Segment of_node(int node) const {
    Segment whole = shard(node, 0);
    for (int member = 1; member < members_; ++member) {
      const Segment part = shard(node, member);
      whole = {std::min(whole.begin, part.begin), std::max(whole.end, part.end)};
    }
    return whole;
  }

  // Of equal shards one counts, on the owner's node.
  bool counts(int node) const { return num_chunks_ > members_ || node == owners_node(); }
  Segment counted(int node, int member) const {
    return counts(node) && member < num_chunks_ ? shard(node, member) : Segment{};
  }

 private:
  int members_;
  const Parameter& parameter_;
  int num_chunks_;
};

at::Tensor part_of(const at::Tensor& flat, const Segment& part, std::int64_t origin = 0) {
  return flat.narrow(0, part.size() == 0 ? 0 : part.begin - origin, part.size());
}

// Members of a group but this one, beginning after it, so that not all send to the first.
std::vector<int> others(const Group& group) {
  std::vector<int> members;
  for (int i = 1; i < group.size(); ++i) members.push_back((group.rank() + i) % group.size());
  return members;
}

// Messages that are under way.
class Messages {
 public:
  // `name` of a parameter's tensor: every message has a name of its own between two ranks.
  void send(Group& group, const at::Tensor& values, int to, const std::string& name) {
    pending_.push_back(group.send(values, to, name));
  }
  void receive(Group& group, const at::Tensor& target, int from, const std::string& name) {
    pending_.push_back(group.receive(target, from, name));
  }
  void wait() {
    for (Pending& message : pending_) message.wait();
    pending_.clear();
  }

 private:
  std::vector<Pending> pending_;
};

std::string described(const std::string& name, ParameterIndex parameter) {
  return core::message("shards of ", name, " of matrix ", parameter.value());
}

}  // namespace

Segment shard_of(const Parameter& parameter, int num_chunks, Slot slot) {
  const std::int64_t rows = parameter.sizes[0];
  const std::int64_t chunk = (rows + num_chunks - 1) / num_chunks;
  const std::int64_t row = parameter.num_elements() / rows;
  const std::int64_t begin = std::min(rows, chunk * (slot.value() % num_chunks));
  return {begin * row, std::min(rows, begin + chunk) * row};
}

std::vector<at::Tensor> to_shards(SharedMesh& mesh, const Parameters& all, const Owned& owned,
                                  const std::vector<ParameterIndex>& which, const std::string& name,
                                  at::ScalarType dtype, int num_chunks) {
  owned.require_name(name);
  const auto options = at::TensorOptions().dtype(dtype).device(owned.pool()->device());
  const int node = mesh.column.rank();
  const int here = mesh.row.rank();
  std::vector<at::Tensor> shards;
  Messages messages;
  for (const std::vector<ParameterIndex>& piece : pieces_of(all, which)) {
    std::vector<at::Tensor> of_node;  // at the column members; elsewhere undefined
    for (const ParameterIndex parameter : piece) {
      const Cut cut(mesh, all[parameter], num_chunks);
      of_node.emplace_back();
      if (cut.owners_column() != here) continue;
      const std::string what = described(name, parameter);
      if (owned.owns(parameter)) {
        const at::Tensor whole = owned.of(parameter, name).view({-1}).to(options.dtype());
        for (const int other : others(mesh.column))
          messages.send(mesh.column, part_of(whole, cut.of_node(other)), other, what);
        of_node.back() = part_of(whole, cut.of_node(node));
      } else {
        of_node.back() = at::empty({cut.of_node(node).size()}, options);
        messages.receive(mesh.column, of_node.back(), cut.owners_node(), what);
      }
    }
    messages.wait();
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const Cut cut(mesh, all[piece[i]], num_chunks);
      const std::string what = described(name, piece[i]);
      shards.push_back(at::empty({cut.shard(node, here).size()}, options));
      if (cut.owners_column() != here) {
        messages.receive(mesh.row, shards.back(), cut.owners_column(), what);
        continue;
      }
      const std::int64_t origin = cut.of_node(node).begin;
      for (const int other : others(mesh.row))
        messages.send(mesh.row, part_of(of_node[i], cut.shard(node, other), origin), other, what);
      shards.back().copy_(part_of(of_node[i], cut.shard(node, here), origin));
    }
    messages.wait();
  }
  return shards;
}

void from_shards(SharedMesh& mesh, const Parameters& all, const Owned& owned,
                 const std::vector<ParameterIndex>& which, const std::string& name,
                 const std::vector<at::Tensor>& shards, int num_chunks) {
  owned.require_name(name);
  core::invariant(shards.size() == which.size(), "from_shards: expected ", which.size(),
                  " shards, got ", shards.size());
  const auto options = at::TensorOptions().dtype(at::kFloat).device(owned.pool()->device());
  const int node = mesh.column.rank();
  const int here = mesh.row.rank();
  Messages messages;
  auto next = shards.begin();
  for (const std::vector<ParameterIndex>& piece : pieces_of(all, which)) {
    std::vector<at::Tensor> of_node;  // at the column members; at owners a part of their tensor
    for (const ParameterIndex parameter : piece) {
      const Cut cut(mesh, all[parameter], num_chunks);
      const std::string what = described(name, parameter);
      const at::Tensor mine =
          next++->narrow(0, 0, cut.counted(node, here).size()).to(options.device(), at::kFloat);
      of_node.emplace_back();
      if (cut.owners_column() != here) {
        messages.send(mesh.row, mine, cut.owners_column(), what);
        continue;
      }
      const Segment whole = cut.counts(node) ? cut.of_node(node) : Segment{};
      of_node.back() = owned.owns(parameter) ? part_of(owned.of(parameter, name).view({-1}), whole)
                                             : at::empty({whole.size()}, options);
      for (const int other : others(mesh.row))
        messages.receive(mesh.row, part_of(of_node.back(), cut.counted(node, other), whole.begin),
                         other, what);
      part_of(of_node.back(), cut.counted(node, here), whole.begin).copy_(mine);
    }
    messages.wait();
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const Cut cut(mesh, all[piece[i]], num_chunks);
      const std::string what = described(name, piece[i]);
      if (cut.owners_column() != here) continue;
      if (!owned.owns(piece[i])) {
        messages.send(mesh.column, of_node[i], cut.owners_node(), what);
        continue;
      }
      for (const int other : others(mesh.column)) {
        if (cut.counts(other))
          messages.receive(mesh.column,
                           part_of(owned.of(piece[i], name).view({-1}), cut.of_node(other)), other,
                           what);
      }
    }
    messages.wait();
  }
}

}  // namespace dmuon::engine
