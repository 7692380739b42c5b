#include "dmuon/engine/gradient_norms.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace dmuon::engine {
namespace {

using core::ParameterIndex;
using core::Slot;

// Of four ranks; parameter 1 is another rank's, 2 a stack of two.
class GradientNormsTest : public testing::Test {
 protected:
  static constexpr int kNumSlots = 4;
  static constexpr layout::Mesh kMesh{1, kNumSlots};
  static constexpr ParameterIndex kSingle{0};
  static constexpr ParameterIndex kStack{2};

  void fill(ParameterIndex parameter, const at::Tensor& values) {
    owned.accumulate(parameter, 0, values, 1);
    owned.set_filled(parameter, true);
  }

  std::vector<double> measure(const at::Tensor& host = {}, int slot = 0, int num_host_shards = 2) {
    GradientNorms norms(owned, {}, kMesh, Slot(slot), 0, num_host_shards);
    return values_of(norms.measure(host));
  }

  static std::vector<double> values_of(const at::Tensor& words) {
    const auto* data = words.const_data_ptr<double>();
    return {data, data + words.numel()};
  }

  const layout::Parameters all{{{"", {1, 2, 3}}, {}}, {{"", {1, 9, 9}}, {}}, {{"", {2, 2, 3}}, {}}};
  wire::Owned owned{all, {{kSingle, kStack}}, std::make_shared<wire::BufferPool>(c10::kCPU)};
};

TEST_F(GradientNormsTest, AddsTheMatricesOfAParameter) {
  fill(kSingle, at::full({6}, 0.5));
  fill(kStack, at::arange(1, 13, at::TensorOptions().dtype(at::kFloat)));
  const std::vector<double> words = measure();
  ASSERT_EQ(words.size(), 3 + 2 * kNumSlots);
  EXPECT_DOUBLE_EQ(words[0], 1.5);
  EXPECT_EQ(words[1], 0);
  EXPECT_NEAR(words[2], 12 * 13 * 25 / 6.0, 1e-9);
}

// Memory that nothing was written to may hold a NaN.
TEST_F(GradientNormsTest, CountsNothingWhereNothingIsHeld) {
  owned.batches()[core::BatchIndex(0)].tensors.at(wire::kGradient).fill_(NAN);
  fill(kStack, at::full({12}, 2.0));
  GradientNorms norms(owned, {}, kMesh, Slot(0), 0, 2);
  const auto words = [&] { return values_of(norms.measure({})); };
  EXPECT_EQ(words()[0], 0);
  EXPECT_DOUBLE_EQ(words()[2], 48);
  fill(kSingle, at::full({6}, 1.0));
  owned.set_filled(kStack, false);
  EXPECT_DOUBLE_EQ(words()[0], 6);
  EXPECT_EQ(words()[2], 0);
}

TEST_F(GradientNormsTest, KeepsOnlyWhatHasAGradientOnSomeRank) {
  fill(kSingle, at::full({6}, 1.0));
  fill(kStack, at::full({12}, 1.0));
  GradientNorms norms(owned, {}, kMesh, Slot(0), 0, 2);
  const at::Tensor words = norms.measure({});
  norms.keep_only({true, true, false});
  EXPECT_DOUBLE_EQ(words[0].item<double>(), 6);
  EXPECT_EQ(words[2].item<double>(), 0);
}

// Replicas hold the same shards; what every rank holds alike counts once.
TEST_F(GradientNormsTest, CountsEachOfTheHostsGradientsOnce) {
  for (int num_shards : {1, 2, 4}) {
    double sum = 0;
    for (int slot = 0; slot < kNumSlots; ++slot) {
      const double sharded = std::pow(10, slot % num_shards);
      const std::vector<double> words =
          measure(at::tensor({sharded, 5e-9}, at::kDouble), slot, num_shards);
      for (const double word : words) sum += word;
      EXPECT_EQ(words[static_cast<std::size_t>(3 + 2 * slot)], slot < num_shards ? sharded : 0);
    }
    EXPECT_DOUBLE_EQ(sum, (std::pow(10, num_shards) - 1) / 9 + 5e-9);
  }
}

// Also a copy of a shard, which does not count otherwise.
TEST_F(GradientNormsTest, TellsWhatIsNotFiniteOfAnyRank) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    for (const auto& host : {at::tensor({bad, 0.}), at::tensor({0., bad})}) {
      for (int slot = 0; slot < kNumSlots; ++slot) {
        GradientNorms norms(owned, {}, kMesh, Slot(slot), 0, 2);
        const at::Tensor words = norms.measure(host.to(at::kDouble));
        EXPECT_FALSE((Verdict{{true, true, true}, words}.finite().item<bool>()));
      }
    }
    fill(kSingle, at::full({6}, bad));
    EXPECT_FALSE(std::isfinite(measure()[0]));
    owned.set_filled(kSingle, false);
  }
}

TEST_F(GradientNormsTest, TakesMaximaAlong) {
  constexpr double kEnd = std::numeric_limits<double>::infinity();
  fill(kSingle, at::full({6}, 0.5));
  GradientNorms norms(owned, {}, kMesh, Slot(0), 0, 2);
  const std::vector<double> without = values_of(norms.measure({}));
  norms.set_num_maxima(3);
  const auto words = [&](const at::Tensor& maxima) {
    std::vector<double> found = values_of(norms.measure({}, maxima));
    const auto begin = found.end() - 3;
    EXPECT_EQ(std::vector<double>(found.begin(), begin), without);
    return std::vector<double>(begin, found.end());
  };
  EXPECT_EQ(words({}), (std::vector<double>{-kEnd, -kEnd, -kEnd}));
  EXPECT_EQ(words(at::tensor({-2., NAN, -kEnd}, at::kDouble)),
            (std::vector<double>{-2, kEnd, -kEnd}));
  norms.set_num_maxima(0);
  EXPECT_EQ(values_of(norms.measure({})), without);
}

TEST(Verdict, HasNormsThatScaleWithTheirGradients) {
  const NormWords words{.num_parameters = 2, .num_slots = 2};
  Verdict verdict{{true, true}, at::tensor({4., 0.25, 16., 0., 0., 0.}, at::kDouble), {}, words};
  EXPECT_DOUBLE_EQ(verdict.norm().item<double>(), 4.5);
  EXPECT_TRUE(verdict.norms().equal(at::tensor({2., 0.5}, at::kDouble)));
  EXPECT_TRUE(verdict.finite().item<bool>());
  verdict.scale(at::tensor(0.5f));
  EXPECT_DOUBLE_EQ(verdict.norm().item<double>(), 2.25);
  EXPECT_TRUE(verdict.norms().equal(at::tensor({1., 0.25}, at::kDouble)));
}

}  // namespace
}  // namespace dmuon::engine
