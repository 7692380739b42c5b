// The engine with tensor parallelism: publications, routes and updates of slices, on ranks that are
// threads, beside whole matrices in one process.

#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "tests/optim/groups.h"
#include "tests/wire/groups.h"

namespace dmuon::optim {
namespace {

using core::LeafIndex;
using core::ParameterIndex;
using core::UnitIndex;
using layout::Mesh;

// A leaf of one parameter in a unit, and how tensor parallelism cuts it.
struct Leaf {
  layout::View view;
  std::vector<std::int64_t> sizes;
  std::optional<layout::Cut> cut;
  int unit;
};

const std::vector<Leaf> kModel{
    {{1, 8, 6}, {8, 6}, layout::Cut{0}, 0}, {{1, 8, 6}, {8, 6}, layout::Cut{1}, 0},
    {{1, 7, 5}, {7, 5}, layout::Cut{0}, 0}, {{4, 4, 6}, {16, 6}, layout::Cut{0, 2}, 0},
    {{1, 5, 3}, {5, 3}, std::nullopt, 0},   {{1, 8, 6}, {8, 6}, layout::Cut{0}, 1},
    {{1, 8, 6}, {8, 6}, layout::Cut{1}, 1}, {{2, 4, 6}, {2, 4, 6}, layout::Cut{2}, 1},
    {{1, 8, 6}, {8, 6}, layout::Cut{0}, 1},
};
constexpr int kNumUnits = 2;

plan::Plan plan_on(const Mesh& mesh) {
  plan::Plan plan;
  plan.mesh = mesh;
  std::map<std::tuple<int, std::int64_t, std::int64_t>, std::vector<ParameterIndex>> batches;
  for (const Leaf& leaf : kModel) {
    const ParameterIndex index(plan.inventory.size());
    plan.inventory.push_back({"weight " + std::to_string(index.value()), leaf.view, leaf.unit});
    const int owner = (3 * index.value() + 1) % mesh.num_owners();
    plan.owner.push_back(core::Owner(owner));
    batches[{owner, leaf.view.rows, leaf.view.cols}].push_back(index);
  }
  for (const auto& [key, batch] : batches)
    plan.batches.push_back({core::Owner(std::get<0>(key)), batch});
  return plan;
}

// Rank t of slot s is rank s * T + t.
wire::SharedMesh make_mesh(const Mesh& mesh, const wire::StorePtr& store, int rank) {
  const int tensor_rank = rank % mesh.tensor_parallel;
  const core::Slot slot(rank / mesh.tensor_parallel);
  const int replicate = mesh.replicate_of(slot).value();
  const int shard = mesh.shard_of(slot).value();
  const auto group = [&](const std::string& name, int member, int size) {
    return wire::make_group(store, name, member, size);
  };
  const auto along = [&](const std::string& where) {
    const std::string name = where + std::to_string(tensor_rank);
    return layout::PerAxis<wire::Group>{
        group(name + " row " + std::to_string(replicate), shard, mesh.num_shards),
        group(name + " column " + std::to_string(shard), replicate, mesh.num_replicates)};
  };
  const auto slices = [&](const std::string& name) {
    return group(name + std::to_string(slot.value()), tensor_rank, mesh.tensor_parallel);
  };
  return {along("device"),
          along("host"),
          group("everyone", rank, mesh.num_owners()),
          {},
          wire::TensorParallel{slices("slices"), slices("words")}};
}

std::unique_ptr<engine::Engine> make_engine(const wire::SharedMesh& shared, const Mesh& mesh) {
  layout::LeafSizes sizes;
  layout::Cuts cuts;
  for (const Leaf& leaf : kModel) {
    sizes.push_back(leaf.sizes);
    cuts.push_back(leaf.cut);
  }
  const std::vector<engine::UnitSpec> units{{"unit 0", at::kFloat, at::kFloat},
                                            {"unit 1", at::kFloat, at::kFloat}};
  return std::make_unique<engine::Engine>(engine::EngineOptions{}, shared, plan_on(mesh), units,
                                          sizes, cuts);
}

at::Tensor whole_of(const Leaf& leaf, unsigned seed) { return random_tensor(leaf.sizes, seed); }

// torch.chunk of each of the equal blocks.
at::Tensor cut(const Leaf& leaf, const at::Tensor& whole, int size, int rank) {
  if (!leaf.cut) return whole;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& block : whole.chunk(leaf.cut->factor, leaf.cut->dimension))
    parts.push_back(block.chunk(size, leaf.cut->dimension).at(static_cast<std::size_t>(rank)));
  return at::cat(parts, leaf.cut->dimension);
}

class Ranks : public testing::TestWithParam<Mesh> {};

// The whole matrices, as one process has them.
class Reference {
 public:
  Reference() {
    for (std::size_t i = 0; i < kModel.size(); ++i) {
      masters.push_back(whole_of(kModel[i], static_cast<unsigned>(i)));
      momenta_.push_back(at::zeros_like(masters.back()));
    }
  }

  // Returns the norm of all gradients.
  double step(const std::vector<at::Tensor>& gradients) {
    double squares = 0;
    for (std::size_t i = 0; i < kModel.size(); ++i) {
      const std::vector<std::int64_t> sizes{kModel[i].view.num_matrices, kModel[i].view.rows,
                                            kModel[i].view.cols};
      muon_update(masters[i].view(sizes), momenta_[i].view(sizes), gradients[i].view(sizes),
                  group_of(muon(0.05)), at::scalar_tensor(true, at::kBool));
      squares += gradients[i].to(at::kDouble).square().sum().item<double>();
    }
    return std::sqrt(squares);
  }

  std::vector<at::Tensor> masters;

 private:
  std::vector<at::Tensor> momenta_;
};

TEST_P(Ranks, MoveTheWeightsThatOneProcessMoves) {
  const Mesh mesh = GetParam();
  const int size = mesh.tensor_parallel;
  wire::run_ranks(mesh.num_owners(), [&](int rank, const wire::StorePtr& store) {
    const int tensor_rank = rank % size;
    const int data_rank = rank / size;
    const auto made = make_engine(make_mesh(mesh, store, rank), mesh);
    engine::Engine& engine = *made;
    add_states(engine, Muon(muon(0.05)));
    for (int unit = 0; unit < kNumUnits; ++unit) {
      std::vector<at::Tensor> parameters;
      for (const at::Tensor& weight : engine.unit(UnitIndex(unit)).weight_tensors())
        parameters.push_back(weight.set_requires_grad(true));
      engine.bind(UnitIndex(unit), parameters);
    }
    const c10::AutoGradMode no_grad(false);
    Reference reference;
    const auto local = [&](std::size_t leaf, const at::Tensor& whole) {
      return cut(kModel[leaf], whole, size, tensor_rank);
    };
    for (std::size_t i = 0; i < kModel.size(); ++i)
      engine.transfers().scatter(LeafIndex(static_cast<int>(i)), wire::kMaster,
                                 local(i, reference.masters[i]).contiguous());
    engine.publish();
    for (unsigned step = 0; step < 3; ++step) {
      std::vector<at::Tensor> means;
      for (std::size_t i = 0; i < kModel.size(); ++i) {
        const auto of = [&](int data) {
          return whole_of(kModel[i], 1000 * (step + 1) + 100 * static_cast<unsigned>(data) +
                                         static_cast<unsigned>(i));
        };
        means.push_back(of(0));
        for (int data = 1; data < mesh.num_slots(); ++data) means.back().add_(of(data));
        means.back().div_(mesh.num_slots());
        engine.put_gradient(LeafIndex(static_cast<int>(i)), local(i, of(data_rank)));
      }
      for (int unit = 0; unit < kNumUnits; ++unit) engine.route(UnitIndex(unit));
      const engine::Verdict& verdict = engine.agree();
      const double expected = reference.step(means);
      EXPECT_NEAR(verdict.norm().item<double>(), expected, 1e-5 * expected);
      EXPECT_NEAR(verdict.norms()[2].item<double>(), means[2].norm().item<double>(), 1e-5);
      EXPECT_NEAR(verdict.norms()[4].item<double>(), means[4].norm().item<double>(), 1e-5);
      muon_step(engine, groups_of({muon(0.05)}),
                core::Vector<ParameterIndex, int>(static_cast<int>(kModel.size())),
                verdict.finite());
      engine.end_step();
      for (const LeafIndex leaf : engine.leaves().indices()) engine.clear_gradient(leaf);
    }
    for (int unit = 0; unit < kNumUnits; ++unit) {
      engine.unshard(UnitIndex(unit));
      const std::vector<at::Tensor> weights = engine.unit(UnitIndex(unit)).weight_tensors();
      const auto& leaves = engine.unit(UnitIndex(unit)).packing().leaves;
      for (std::size_t place = 0; place < weights.size(); ++place) {
        const auto leaf = leaves.values()[place].index.position();
        EXPECT_TRUE(at::allclose(weights[place], local(leaf, reference.masters[leaf]), 1e-4, 1e-5))
            << "leaf " << leaf << " on rank " << rank;
      }
      engine.reshard(UnitIndex(unit));
    }
    engine.meet("the end");
  });
}

// Exchanges words in place of slices.
class Failing final : public engine::Update {
 public:
  Failing(wire::Group* group, bool fails) : group_(group), fails_(fails) {}
  void prepare(core::BatchIndex) override {}
  void gather(core::BatchIndex batch) override { exchange("gather", batch); }
  void orthogonalise(core::BatchIndex batch) override {
    if (fails_ && batch.value() == 1) throw std::domain_error("no memory");
  }
  void scatter(core::BatchIndex batch) override { exchange("scatter", batch); }
  void apply(core::BatchIndex) override {}

 private:
  void exchange(const char* what, core::BatchIndex batch) {
    group_->all_reduce_max(at::ones({1}), core::message(what, batch)).wait();
  }

  wire::Group* group_;
  bool fails_;
};

// The rank that fails stays, so no connection closes.
TEST(Update, EndsTheWaitsOfOthersWhereItFailsOnARank) {
  for (const Mesh mesh : {Mesh{1, 1, 2}, Mesh{1, 2, 2}}) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<int> num_raised = 0;
    wire::run_ranks(mesh.num_owners(), [&](int rank, const wire::StorePtr& store) {
      wire::SharedMesh shared = make_mesh(mesh, store, rank);
      const auto engine = make_engine(shared, mesh);
      engine->publish();
      const auto update =
          std::make_shared<Failing>(&shared.tensor_parallel->slices, /*fails=*/rank == 1);
      if (rank == 1) {
        EXPECT_THROW(engine->step(update), std::runtime_error);
        while (num_raised < mesh.num_owners() - 1 &&
               std::chrono::steady_clock::now() - start < wire::kTimeout)
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return;
      }
      try {
        engine->step(update);
        EXPECT_NE(rank, 0) << "it needs what rank 1 scatters";
        engine->meet("the end");
        ADD_FAILURE() << "rank " << rank << " has not noticed";
      } catch (const core::CommError& error) {
        const std::string message = error.what();
        EXPECT_NE(message.find("rank 1 of the mesh"), std::string::npos) << message;
        EXPECT_NE(message.find("has failed: no memory"), std::string::npos) << message;
      }
      ++num_raised;
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, wire::kTimeout / 2);
  }
}

TEST(LocalPart, HasAnEmptyParameterWhereACutLeavesNoElements) {
  const Mesh mesh{1, 1, 8};
  layout::LeafSizes sizes{{7, 5}};
  plan::Plan plan;
  plan.mesh = mesh;
  plan.inventory.push_back({"weight", {1, 7, 5}, 0});
  plan.owner.push_back(core::Owner(0));
  plan.batches.push_back({core::Owner(0), {ParameterIndex(0)}});
  const auto elements = [&](int rank) {
    const auto part = engine::local_part(plan, sizes, {layout::Cut{0}}, core::Slot(0), rank);
    return part.parameters.front().num_elements();
  };
  EXPECT_EQ(elements(6), 5);
  EXPECT_EQ(elements(7), 0);
}

INSTANTIATE_TEST_SUITE_P(Meshes, Ranks,
                         testing::Values(Mesh{1, 1, 2}, Mesh{1, 2, 2}, Mesh{2, 1, 2}, Mesh{1, 1, 3},
                                         Mesh{2, 2, 2}));

}  // namespace
}  // namespace dmuon::optim
