#include "dmuon/wire/shards.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "tests/wire/groups.h"

namespace dmuon::wire {
namespace {

using core::LeafIndex;
using core::ParameterIndex;
using layout::Mesh;
using Sizes = std::vector<std::int64_t>;

const std::string kRows = "one value a row";
const std::string kColumns = "one value a column";  // of matrices that are stored transposed
constexpr Mesh kMeshes[] = {{1, 1}, {1, 3}, {2, 2}, {3, 1}};

// Five leaves: a matrix; one with fewer rows than there are chunks; a stack; a stack whose matrices
// have several owners; a matrix whose leaf has three dimensions.
const layout::LeafSizes kSizes = {{5, 3}, {1, 4}, {2, 3, 5}, {4, 3, 5}, {7, 2, 3}};

layout::Parameters parameters_on(const Mesh& mesh) {
  layout::Parameters parameters;
  const auto add = [&](layout::View view, int owner, bool continues = false) {
    parameters.push_back(
        {{"weight", view, 0, false, continues}, core::Slot(owner % mesh.num_slots())});
  };
  add({1, 5, 3}, 1);
  add({1, 1, 4}, 0);
  add({2, 3, 5}, 2);
  add({1, 3, 5}, 2);
  add({2, 3, 5}, 0, true);
  add({1, 3, 5}, 3, true);
  add({1, 14, 3}, 3);
  return parameters;
}

std::int64_t product(const Sizes& sizes) {
  std::int64_t all = 1;
  for (const std::int64_t size : sizes) all *= size;
  return all;
}

// An integer that every dtype holds.
float value(LeafIndex leaf, std::int64_t element) {
  return static_cast<float>((leaf.value() * 37 + element * element * 11 + element * 5) % 251 - 125);
}

// Elements of a leaf's tensor of this name.
std::int64_t num_elements(LeafIndex leaf, const std::string& name) {
  if (name == kColumns) return Sizes{3, 4, 10, 20, 3}[leaf.position()];
  return name == kRows ? Sizes{5, 1, 6, 12, 14}[leaf.position()] : product(kSizes[leaf]);
}

// Rows of columns belong to matrices, and those of a matrix by itself are one.
std::int64_t num_rows(LeafIndex leaf, const std::string& name) {
  return name == kColumns ? Sizes{1, 1, 2, 4, 1}[leaf.position()] : kSizes[leaf][0];
}

// The elements of the leaf that a slot has: each element by itself.
std::vector<std::int64_t> elements_at(core::Slot slot, LeafIndex leaf, const std::string& name,
                                      int num_chunks) {
  const std::int64_t rows = num_rows(leaf, name);
  const std::int64_t rows_a_chunk = (rows + num_chunks - 1) / num_chunks;
  std::vector<std::int64_t> elements;
  for (std::int64_t element = 0; element < num_elements(leaf, name); ++element) {
    const std::int64_t row = element / (num_elements(leaf, name) / rows);
    if (row / rows_a_chunk == slot.value() % num_chunks) elements.push_back(element);
  }
  return elements;
}

at::Tensor flat(const std::vector<float>& values) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())});
  std::ranges::copy(values, tensor.mutable_data_ptr<float>());
  return tensor;
}

std::vector<float> values_of(const at::Tensor& tensor) {
  const at::Tensor copy = tensor.to(at::kFloat).contiguous();
  return {copy.const_data_ptr<float>(), copy.const_data_ptr<float>() + copy.numel()};
}

// One rank of a mesh, and what it owns: a batch for each parameter.
struct Rank {
  Rank(const Mesh& of, const StorePtr& store, int rank)
      : mesh(make_mesh(of, store, rank)), parameters(parameters_on(of)) {
    owned.add(kRows, [](const layout::View& view) { return Sizes{view.rows, 1}; });
    owned.add(kColumns, [](const layout::View& view) { return Sizes{1, view.cols}; });
  }

  std::vector<std::vector<ParameterIndex>> batches() {
    std::vector<std::vector<ParameterIndex>> all;
    for (const ParameterIndex parameter : parameters.indices())
      if (parameters[parameter].owner == mesh.slot()) all.push_back({parameter});
    return all;
  }

  // Calls `body(parameter, leaf, element, &value)` for each element that the rank owns.
  template <typename Body>
  void for_owned(const std::string& name, Body&& body) {
    for (const LeafIndex leaf : leaves.indices()) {
      std::int64_t element = 0;
      for (const ParameterIndex parameter : leaves[leaf].parameters) {
        const layout::View& view = parameters[parameter].view;
        const std::int64_t size = name == kRows      ? view.num_matrices * view.rows
                                  : name == kColumns ? view.num_matrices * view.cols
                                                     : view.num_elements();
        const at::Tensor own = owned.of(parameter, name);
        for (std::int64_t i = 0; i < size; ++i, ++element)
          if (own.defined()) body(parameter, leaf, element, own.data_ptr<float>() + i);
      }
    }
  }

  Shards shards(int num_chunks) { return {&mesh, leaves, parameters, owned, num_chunks}; }

  // Nobody leaves while others still use its connections.
  void end() { mesh.words.all_gather({}, watch::Rendezvous::kComparison, "the end"); }

  SharedMesh mesh;
  layout::Parameters parameters;
  layout::Leaves leaves = layout::leaves_of(parameters, kSizes);
  Owned owned{parameters, batches(), std::make_shared<BufferPool>(c10::kCPU)};
};

const std::vector<LeafIndex> kAll = {LeafIndex(0), LeafIndex(1), LeafIndex(2), LeafIndex(3),
                                     LeafIndex(4)};

TEST(Shards, GiveEachRankItsRowsInAnyDtype) {
  for (const Mesh& mesh : kMeshes) {
    run_ranks(mesh.num_slots(), [&](int number, const StorePtr& store) {
      Rank rank(mesh, store, number);
      for (const std::string& name : {kMaster, kRows, kColumns}) {
        rank.for_owned(name, [](ParameterIndex, LeafIndex leaf, std::int64_t element, float* own) {
          *own = value(leaf, element);
        });
        for (const int num_chunks : {mesh.num_shards, mesh.num_slots()}) {
          for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
            const auto shards = rank.shards(num_chunks).give(kAll, name, dtype);
            ASSERT_EQ(shards.size(), kAll.size());
            for (const LeafIndex leaf : kAll) {
              std::vector<float> expected;
              for (const auto e : elements_at(rank.mesh.slot(), leaf, name, num_chunks))
                expected.push_back(value(leaf, e));
              EXPECT_EQ(shards[leaf.position()].scalar_type(), dtype);
              EXPECT_EQ(values_of(shards[leaf.position()]), expected)
                  << name << " of leaf " << leaf << " in " << num_chunks << " chunks";
            }
          }
        }
      }
      rank.end();
    });
  }
}

// If several nodes have a shard, their values differ here by the node's number times 1000.
TEST(Shards, TakeWhatTheOwnersNodeHas) {
  for (const Mesh& mesh : kMeshes) {
    run_ranks(mesh.num_slots(), [&](int number, const StorePtr& store) {
      Rank rank(mesh, store, number);
      for (const std::string& name : {kMaster, kRows, kColumns}) {
        for (const int num_chunks : {mesh.num_shards, mesh.num_slots()}) {
          const auto of_node = [&](core::Slot slot) {
            return num_chunks > mesh.num_shards ? 0 : 1000 * mesh.replicate_of(slot).value();
          };
          std::vector<at::Tensor> shards;
          for (const LeafIndex leaf : kAll) {
            std::vector<float> values;
            for (const auto e : elements_at(rank.mesh.slot(), leaf, name, num_chunks))
              values.push_back(value(leaf, e) + static_cast<float>(of_node(rank.mesh.slot())));
            shards.push_back(flat(values).to(leaf.value() == 0 ? at::kDouble : at::kFloat));
          }
          for (const OwnedBatch& batch : rank.owned.batches()) batch.tensors.at(name).fill_(-1);
          rank.shards(num_chunks).take(kAll, name, shards);
          rank.for_owned(name, [&](ParameterIndex parameter, LeafIndex leaf, std::int64_t element,
                                   const float* own) {
            const int node = of_node(rank.parameters[parameter].owner);
            EXPECT_EQ(*own, value(leaf, element) + static_cast<float>(node))
                << name << " of leaf " << leaf << ", element " << element;
          });
        }
      }
      rank.end();
    });
  }
}

// Saved on 2 x 2 ranks, loaded on 1 x 3.
TEST(Shards, MoveAVectorARowToAnotherMesh) {
  std::mutex mutex;
  std::map<LeafIndex, std::map<std::int64_t, float>> saved;
  run_ranks(4, [&](int number, const StorePtr& store) {
    Rank rank({2, 2}, store, number);
    rank.for_owned(kRows, [](ParameterIndex, LeafIndex leaf, std::int64_t element, float* own) {
      *own = value(leaf, element);
    });
    const auto shards = rank.shards(4).give(kAll, kRows, at::kFloat);
    for (const LeafIndex leaf : kAll) {
      const std::scoped_lock lock(mutex);
      std::vector<float> values = values_of(shards[leaf.position()]);
      const auto elements = elements_at(rank.mesh.slot(), leaf, kRows, 4);
      ASSERT_EQ(values.size(), elements.size());
      for (std::size_t i = 0; i < values.size(); ++i) saved[leaf][elements[i]] = values[i];
    }
    rank.end();
  });
  run_ranks(3, [&](int number, const StorePtr& store) {
    Rank rank({1, 3}, store, number);
    std::vector<at::Tensor> shards;
    for (const LeafIndex leaf : kAll) {
      std::vector<float> values;
      for (const auto e : elements_at(rank.mesh.slot(), leaf, kRows, 3))
        values.push_back(saved.at(leaf).at(e));
      shards.push_back(flat(values));
    }
    rank.shards(3).take(kAll, kRows, shards);
    rank.for_owned(kRows, [&](ParameterIndex, LeafIndex leaf, std::int64_t element,
                              const float* own) { EXPECT_EQ(*own, value(leaf, element)); });
    rank.end();
  });
}

// Rank 1 has issued the first leaf's messages when it raises, and then ends.
TEST(Shards, RaiseOnEveryRankWithinSecondsIfOneRaisesHalfWay) {
  for (const Mesh& mesh : {Mesh{1, 2}, Mesh{2, 1}}) {
    const auto start = std::chrono::steady_clock::now();
    run_ranks(2, [&](int number, const StorePtr& store) {
      Rank rank(mesh, store, number);
      std::vector<at::Tensor> shards;
      for (const LeafIndex leaf : kAll) {
        const auto elements = elements_at(rank.mesh.slot(), leaf, kMaster, 2);
        const bool fails = number == 1 && leaf.value() == 2;
        shards.push_back(at::empty({fails ? 0 : static_cast<std::int64_t>(elements.size())}));
      }
      if (number == 1) {
        EXPECT_THROW(rank.shards(2).take(kAll, kMaster, shards), c10::Error);
        rank.mesh.watch->over("its program has ended");
      } else {
        try {
          rank.shards(2).take(kAll, kMaster, shards);
          ADD_FAILURE() << "it was taken";
        } catch (const core::CommError& error) {
          const std::string why = error.what();
          EXPECT_NE(why.find("in vain"), std::string::npos) << why;
          EXPECT_NE(why.find("waits for shards of master of parameter 0, "), std::string::npos)
              << why;
          EXPECT_NE(
              why.find("rank 1 of the mesh has issued 0 operations, and is over: its program"),
              std::string::npos)
              << why;
        }
      }
      // No connection closes before all have raised.
      store->add("raised", 1);
      while (store->add("raised", 0) < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout * 8 / 10);
  }
}

}  // namespace
}  // namespace dmuon::wire
