#include "dmuon/engine/shards.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

using core::ParameterIndex;
using core::Slot;
using Tensors = std::vector<at::Tensor>;

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

// Which ranks own the parameters of a piece, and which elements every rank has of each.
class Cut {
 public:
  Cut(const SharedMesh& mesh, const Parameters& all, const std::vector<ParameterIndex>& piece,
      int num_chunks)
      : mesh_(mesh), all_(all), piece_(piece), num_chunks_(num_chunks) {}

  Slot slot(int replicate, int member) const {
    return Slot(replicate * mesh_.num_shards() + member);
  }

  std::vector<ParameterIndex> owned_by(Slot owner) const {
    std::vector<ParameterIndex> found;
    for (const ParameterIndex parameter : piece_) {
      if (all_[parameter].owner == owner) found.push_back(parameter);
    }
    return found;
  }

  // By owner.
  std::vector<ParameterIndex> of_column(int column) const {
    std::vector<ParameterIndex> found;
    for (int replicate = 0; replicate < mesh_.num_replicates(); ++replicate) {
      const std::vector<ParameterIndex> more = owned_by(slot(replicate, column));
      found.insert(found.end(), more.begin(), more.end());
    }
    return found;
  }

  Segment shard(ParameterIndex parameter, Slot slot) const {
    return shard_of(all_[parameter].view, num_chunks_, slot);
  }

  // What the ranks of a node have together, which is one range.
  Segment of_node(ParameterIndex parameter, int replicate) const {
    Segment whole = shard(parameter, slot(replicate, 0));
    for (int member = 1; member < mesh_.num_shards(); ++member) {
      const Segment part = shard(parameter, slot(replicate, member));
      whole = {std::min(whole.begin, part.begin), std::max(whole.end, part.end)};
    }
    return whole;
  }

  // Of equal shards one counts, on the owner's node: nothing where it is another one.
  Segment counted(ParameterIndex parameter, Slot slot) const {
    const bool only = num_chunks_ > mesh_.num_shards();  // every node has others
    const bool first = slot.value() % mesh_.num_shards() < num_chunks_;
    return only || (first && on_owners_node(parameter, slot)) ? shard(parameter, slot) : Segment{};
  }
  Segment counted_of_node(ParameterIndex parameter, int replicate) const {
    const bool only = num_chunks_ > mesh_.num_shards();
    return only || on_owners_node(parameter, slot(replicate, 0)) ? of_node(parameter, replicate)
                                                                 : Segment{};
  }

 private:
  bool on_owners_node(ParameterIndex parameter, Slot slot) const {
    return slot.value() / mesh_.num_shards() == all_[parameter].owner.value() / mesh_.num_shards();
  }

  const SharedMesh& mesh_;
  const Parameters& all_;
  const std::vector<ParameterIndex>& piece_;
  int num_chunks_;
};

at::Tensor part_of(const at::Tensor& flat, const Segment& part, std::int64_t origin = 0) {
  return flat.narrow(0, part.begin - origin, part.size());
}

std::int64_t sum_of(const std::vector<std::int64_t>& sizes) {
  std::int64_t sum = 0;
  for (const std::int64_t size : sizes) sum += size;
  return sum;
}

// One message between each two members of a group. Both functions are called with every member:
// `sent` returns the flat tensors that it gets, `sizes` those of the tensors that come from it.
// Returns what came, by member and in order.
template <typename Sent, typename Sizes>
Tensors exchange(Group& group, at::TensorOptions options, const std::string& what, const Sent& sent,
                 const Sizes& sizes) {
  Tensors outgoing;
  std::vector<std::int64_t> outgoing_sizes;
  std::vector<std::int64_t> incoming_sizes;
  std::vector<std::int64_t> parts;
  for (int member = 0; member < group.size(); ++member) {
    outgoing_sizes.push_back(0);
    for (const at::Tensor& tensor : sent(member)) {
      outgoing.push_back(tensor.to(options.dtype()));
      outgoing_sizes.back() += tensor.numel();
    }
    const std::vector<std::int64_t> from = sizes(member);
    incoming_sizes.push_back(sum_of(from));
    parts.insert(parts.end(), from.begin(), from.end());
  }
  const at::Tensor out = outgoing.empty() ? at::empty({0}, options) : at::cat(outgoing);
  at::Tensor in = at::empty({sum_of(incoming_sizes)}, options);
  group.all_to_all(in, out, incoming_sizes, outgoing_sizes, what).wait();
  return in.split_with_sizes(parts);
}

}  // namespace

Segment shard_of(const plan::View& view, int num_chunks, Slot slot) {
  const std::int64_t rows = view.sizes()[0];
  const std::int64_t chunk = (rows + num_chunks - 1) / num_chunks;
  const std::int64_t row = view.num_elements() / rows;
  const std::int64_t begin = std::min(rows, chunk * (slot.value() % num_chunks));
  return {begin * row, std::min(rows, begin + chunk) * row};
}

std::vector<at::Tensor> to_shards(SharedMesh& mesh, const Parameters& all, const Owned& owned,
                                  const std::vector<ParameterIndex>& which, const std::string& name,
                                  at::ScalarType dtype, int num_chunks) {
  owned.require_name(name);
  const auto options = at::TensorOptions().dtype(dtype).device(owned.pool()->device());
  const std::string what = "shards of " + name;
  const int node = mesh.column.rank();
  core::Vector<ParameterIndex, at::Tensor> shards(all.size());
  for (const std::vector<ParameterIndex>& piece : pieces_of(all, which)) {
    const Cut cut(mesh, all, piece, num_chunks);
    const std::vector<ParameterIndex> column = cut.of_column(mesh.row.rank());
    const Tensors of_node = exchange(
        mesh.column, options, what,
        [&](int member) {
          Tensors parts;
          for (const ParameterIndex parameter : cut.owned_by(mesh.slot()))
            parts.push_back(
                part_of(owned.of(parameter, name).view({-1}), cut.of_node(parameter, member)));
          return parts;
        },
        [&](int member) {
          std::vector<std::int64_t> sizes;
          for (const ParameterIndex parameter : cut.owned_by(cut.slot(member, mesh.row.rank())))
            sizes.push_back(cut.of_node(parameter, node).size());
          return sizes;
        });
    const Tensors own = exchange(
        mesh.row, options, what,
        [&](int member) {
          Tensors parts;
          for (std::size_t i = 0; i < column.size(); ++i)
            parts.push_back(part_of(of_node[i], cut.shard(column[i], cut.slot(node, member)),
                                    cut.of_node(column[i], node).begin));
          return parts;
        },
        [&](int member) {
          std::vector<std::int64_t> sizes;
          for (const ParameterIndex parameter : cut.of_column(member))
            sizes.push_back(cut.shard(parameter, mesh.slot()).size());
          return sizes;
        });
    std::size_t next = 0;
    for (int member = 0; member < mesh.row.size(); ++member) {
      for (const ParameterIndex parameter : cut.of_column(member))
        shards[parameter] = own[next++].clone();
    }
  }
  Tensors found;
  for (const ParameterIndex parameter : which) found.push_back(shards[parameter]);
  return found;
}

void from_shards(SharedMesh& mesh, const Parameters& all, const Owned& owned,
                 const std::vector<ParameterIndex>& which, const std::string& name,
                 const std::vector<at::Tensor>& shards, int num_chunks) {
  owned.require_name(name);
  core::invariant(shards.size() == which.size(), "from_shards: expected ", which.size(),
                  " shards, got ", shards.size());
  core::Vector<ParameterIndex, at::Tensor> given(all.size());
  for (std::size_t i = 0; i < which.size(); ++i) given[which[i]] = shards[i];
  if (shards.empty()) return;
  const auto options = shards[0].options().device(owned.pool()->device());
  const std::string what = "shards of " + name;
  const int node = mesh.column.rank();
  for (const std::vector<ParameterIndex>& piece : pieces_of(all, which)) {
    const Cut cut(mesh, all, piece, num_chunks);
    const auto sizes_from = [&](const std::vector<ParameterIndex>& parameters, const auto& part) {
      std::vector<std::int64_t> sizes;
      for (const ParameterIndex parameter : parameters) sizes.push_back(part(parameter).size());
      return sizes;
    };
    const std::vector<ParameterIndex> column = cut.of_column(mesh.row.rank());
    const Tensors came = exchange(
        mesh.row, options, what,
        [&](int member) {
          Tensors parts;
          for (const ParameterIndex parameter : cut.of_column(member))
            parts.push_back(
                given[parameter].narrow(0, 0, cut.counted(parameter, mesh.slot()).size()));
          return parts;
        },
        [&](int member) {
          return sizes_from(column, [&](ParameterIndex parameter) {
            return cut.counted(parameter, cut.slot(node, member));
          });
        });
    core::Vector<ParameterIndex, at::Tensor> of_node(all.size());
    for (std::size_t i = 0; i < column.size(); ++i) {
      Tensors parts;
      for (std::size_t member = 0; member * column.size() < came.size(); ++member)
        parts.push_back(came[member * column.size() + i]);
      of_node[column[i]] = at::cat(parts);
    }
    const std::vector<ParameterIndex> mine = cut.owned_by(mesh.slot());
    const Tensors parts = exchange(
        mesh.column, options, what,
        [&](int member) {
          Tensors sent;
          for (const ParameterIndex parameter : cut.owned_by(cut.slot(member, mesh.row.rank())))
            sent.push_back(of_node[parameter]);
          return sent;
        },
        [&](int member) {
          return sizes_from(mine, [&](ParameterIndex parameter) {
            return cut.counted_of_node(parameter, member);
          });
        });
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const ParameterIndex parameter = mine[i % mine.size()];
      const int member = static_cast<int>(i / mine.size());
      part_of(owned.of(parameter, name).view({-1}), cut.counted_of_node(parameter, member))
          .copy_(parts[i]);
    }
  }
}

}  // namespace dmuon::engine
