#include "dmuon/optim/slice_update.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "tests/optim/groups.h"
#include "tests/wire/groups.h"

namespace dmuon::optim {
namespace {

using core::BatchIndex;
using core::ParameterIndex;
using layout::View;

// A parameter, and how tensor parallelism cuts it. No sizes: every rank has all of it.
struct Leaf {
  View view;
  std::vector<std::int64_t> sizes;
  layout::Cut cut;
  int owner;
  int group;
};

// Two batches; owners beyond the last rank stand for it.
const std::vector<std::vector<Leaf>> kBatches{
    {
        {{1, 6, 8}, {6, 8}, {0}, 0, 0},           // colwise
        {{1, 6, 8}, {6, 8}, {0}, 0, 0},           // equal slices, one copy
        {{1, 6, 8}, {6, 8}, {1}, 0, 0},           // rowwise, of the same shape
        {{1, 6, 8}, {6, 8}, {1}, 0, 1},           // another group
        {{3, 6, 8}, {18, 8}, {0}, 1, 1},          // heads
        {{2, 6, 8}, {12, 8}, {0, 2}, 1, 0},       // gate and up in a rank's own slices
        {{1, 6, 8}, {6, 8}, {1, 2}, 1, 0},        // likewise, stored as [in, out]
        {{1, 7, 5}, {7, 5}, {0}, 1, 0},           // uneven
        {{1, 7, 5, 1, true}, {7, 5}, {1}, 1, 0},  // [in, out]
        {{1, 4, 6, 2}, {4, 6}, {1}, 2, 1},        // two blocks of columns
        {{1, 2, 9}, {2, 9}, {0}, 2, 0},           // less rows than ranks
        {{1, 6, 8}, {}, {}, 2, 0},                // replicated
        {{1, 6, 8}, {6, 8}, {0}, 2, -1},          // stays
    },
    {{{2, 3, 4}, {2, 3, 4}, {2}, 1, 1}},  // experts; other owners have nothing
};

struct Model {
  layout::Parameters local;
  wire::SlicedParameters sliced;
  std::vector<std::vector<ParameterIndex>> batches;
  core::Vector<ParameterIndex, int> group_of;
};

Model model_of(int size, int rank) {
  Model model;
  for (const std::vector<Leaf>& leaves : kBatches) {
    std::vector<ParameterIndex>& batch = model.batches.emplace_back();
    for (const Leaf& leaf : leaves) {
      batch.emplace_back(model.local.size());
      wire::SlicedParameter sliced{leaf.view, std::min(leaf.owner, size - 1), {}};
      for (int other = 0; other < size && !leaf.sizes.empty(); ++other) {
        sliced.slices.push_back(
            layout::slices_of(leaf.sizes, {leaf.view}, leaf.cut, size, other)[0]);
      }
      const std::int64_t num_elements = sliced.num_elements(rank);
      model.local.push_back({{"a", {num_elements, 1, 1}, 0}, core::Slot(0)});
      model.sliced.push_back(std::move(sliced));
      model.group_of.push_back(leaf.group);
    }
  }
  return model;
}

// The rank's elements of a matrix, one by one.
at::Tensor cut(const wire::SlicedParameter& parameter, const at::Tensor& whole, int rank) {
  if (parameter.is_replicated()) return whole.reshape({-1});
  std::vector<at::Tensor> parts{at::empty({0})};
  for (const layout::Block& block : parameter.slices[static_cast<std::size_t>(rank)].blocks) {
    for (std::int64_t matrix = block.matrices.begin; matrix < block.matrices.end; ++matrix) {
      for (std::int64_t row = block.rows.begin; row < block.rows.end; ++row) {
        for (const layout::Segment& cols : block.cols.segments)
          parts.push_back(whole[matrix][row].narrow(0, cols.begin, cols.size()));
      }
    }
  }
  return at::cat(parts);
}

at::Tensor whole_of(const View& view, unsigned seed) {
  return random_tensor({view.num_matrices, view.rows, view.cols}, seed);
}

std::vector<MuonGroup> groups() {
  MuonOptions second = muon(0.02);
  second.adjust_lr = AdjustLr::kMatchRmsAdamw;
  second.nesterov = false;
  return groups_of({muon(0.05), second});
}

void update(const Model& model, const wire::Owned& owned, wire::Group* group, bool applies) {
  const c10::AutoGradMode no_grad(false);
  SliceUpdate update(owned, model.sliced, group, groups(), model.group_of,
                     at::scalar_tensor(applies, at::kBool));
  for (const BatchIndex batch : owned.batches().indices()) update.prepare(batch);
  for (const BatchIndex batch : owned.batches().indices()) update.gather(batch);
  for (const BatchIndex batch : owned.batches().indices()) update.orthogonalise(batch);
  for (const BatchIndex batch : owned.batches().indices()) update.scatter(batch);
  for (const BatchIndex batch : owned.batches().indices()) update.apply(batch);
}

class SliceUpdates : public testing::TestWithParam<int> {};

TEST_P(SliceUpdates, MoveSlicesAsTheWholeMatricesMove) {
  const int size = GetParam();
  wire::run_ranks(size, [&](int rank, const wire::StorePtr& store) {
    wire::Group group = wire::make_group(store, "tensor parallel", rank, size);
    const Model model = model_of(size, rank);
    wire::Owned owned(model.local, model.batches, std::make_shared<wire::BufferPool>(c10::kCPU));
    owned.add(kMomentum);
    std::vector<at::Tensor> masters;
    std::vector<at::Tensor> momenta;
    for (const ParameterIndex parameter : model.sliced.indices()) {
      const View& view = model.sliced[parameter].whole;
      masters.push_back(whole_of(view, static_cast<unsigned>(parameter.value())));
      momenta.push_back(at::zeros_like(masters.back()));
      owned.of(parameter, wire::kMaster)
          .view({-1})
          .copy_(cut(model.sliced[parameter], masters.back(), rank));
    }
    for (unsigned step = 0; step < 4; ++step) {
      const bool applies = step != 2;
      for (const ParameterIndex parameter : model.sliced.indices()) {
        const wire::SlicedParameter& of = model.sliced[parameter];
        const at::Tensor gradient =
            whole_of(of.whole, 100 * (step + 1) + static_cast<unsigned>(parameter.value()));
        owned.of(parameter, wire::kGradient).view({-1}).copy_(cut(of, gradient, rank).mul(4));
        if (model.group_of[parameter] < 0) continue;
        muon_update(masters[parameter.position()], momenta[parameter.position()], gradient,
                    groups()[static_cast<std::size_t>(model.group_of[parameter])],
                    at::scalar_tensor(applies, at::kBool), of.whole.column_blocks,
                    of.whole.transposed);
      }
      owned.scale_gradients(at::scalar_tensor(0.25, at::kFloat));
      update(model, owned, &group, applies);
    }
    for (const ParameterIndex parameter : model.sliced.indices()) {
      for (const auto& [name, whole] : {std::pair{wire::kMaster, masters[parameter.position()]},
                                        {kMomentum, momenta[parameter.position()]}}) {
        const at::Tensor expected = cut(model.sliced[parameter], whole, rank);
        const at::Tensor got = owned.of(parameter, name).view({-1});
        EXPECT_TRUE(at::allclose(got, expected, 1e-5, 1e-5))
            << name << " of " << parameter << ": " << got << " for " << expected;
      }
    }
    // Two messages a step and batch to each other rank, at most.
    const std::int64_t most = 4 * std::int64_t{2} * 2 * (size - 1);
    EXPECT_LE(group.traffic().num_messages, most);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, SliceUpdates, testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace dmuon::optim
