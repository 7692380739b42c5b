#include "dmuon/wire/owned.h"

#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <thread>

#include "dmuon/core/error.h"

namespace dmuon::wire {
namespace {

using core::ParameterIndex;

// Parameter 1 is another rank's; 0 and 3, a stack of two, are one batch, 2 is another.
class OwnedTest : public testing::Test {
 protected:
  static constexpr ParameterIndex kSingle{0};
  static constexpr ParameterIndex kElsewhere{1};
  static constexpr ParameterIndex kOther{2};
  static constexpr ParameterIndex kStack{3};

  // All of a parameter.
  void accumulate(ParameterIndex parameter, const at::Tensor& values, double scale) {
    owned.accumulate(parameter, 0, values, scale);
    owned.set_filled(parameter, true);
  }

  at::Tensor gradient(ParameterIndex parameter) {
    return owned.of(parameter, kGradient).view({-1});
  }

  void poison() {
    for (const OwnedBatch& batch : owned.batches())
      batch.tensors.at(kGradient).fill_(std::numeric_limits<double>::quiet_NaN());
  }

  const layout::Parameters all{
      {{"", {1, 2, 3}}, {}}, {{"", {1, 9, 9}}, {}}, {{"", {1, 2, 3}}, {}}, {{"", {2, 2, 3}}, {}}};
  std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>(c10::kCPU);
  Owned owned{all, {{kSingle, kStack}, {kOther}}, pool};
};

// Six values from `first` on.
at::Tensor row(double first, at::ScalarType dtype) {
  return at::arange(first, first + 6, at::TensorOptions().dtype(dtype));
}

TEST_F(OwnedTest, FindsEachParameterInItsBatch) {
  float value = 0;
  for (const ParameterIndex parameter : all.indices()) {
    const at::Tensor master = owned.of(parameter, kMaster);
    EXPECT_EQ(master.defined(), owned.owns(parameter));
    EXPECT_EQ(master.defined(), parameter != kElsewhere);
    if (!master.defined()) continue;
    EXPECT_EQ(master.sizes().vec(), all[parameter].view.sizes());
    master.fill_(++value);
  }
  const OwnedBatch& first = owned.batches()[core::BatchIndex(0)];
  EXPECT_EQ(first.tensors.at(kMaster)[0].sum().item<float>(), 6 * 1);
  EXPECT_EQ(first.part(kMaster, 1, 2).sizes().vec(), (std::vector<std::int64_t>{2, 2, 3}));
  EXPECT_EQ(first.part(kMaster, 1, 2).sum().item<float>(), 12 * 3);
  EXPECT_EQ(first.part(kMaster, 0, 2).sum().item<float>(), 6 * 1 + 12 * 3);
  EXPECT_EQ(owned.of(kOther, kMaster).sum().item<float>(), 6 * 2);
}

TEST_F(OwnedTest, OverwritesWhatItDoesNotHold) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    owned.set_filled(kSingle, false);
    poison();
    accumulate(kSingle, row(1, dtype), 0.5);
    for (int i = 0; i < 6; ++i)
      EXPECT_EQ(gradient(kSingle)[i].item<float>(), 0.5F * static_cast<float>(1 + i));
    EXPECT_TRUE(owned.filled(kSingle));
    EXPECT_FALSE(owned.filled(kStack));
    EXPECT_TRUE(std::isnan(gradient(kStack)[0].item<float>()));
  }
}

TEST_F(OwnedTest, AddsToWhatItHolds) {
  accumulate(kOther, row(0, at::kBFloat16), 2);
  accumulate(kOther, row(10, at::kFloat), 0.25);
  for (int i = 0; i < 6; ++i) {
    const double expected = 2.0 * i + 0.25 * (10 + i);
    EXPECT_EQ(gradient(kOther)[i].item<float>(), static_cast<float>(expected));
  }
}

// The factor reaches the memory where somebody reads, and is rounded as in a pass of its own.
TEST_F(OwnedTest, LetsAFactorWaitUntilGradientsAreRead) {
  const auto factor = [](double value) { return at::full({}, value, at::kFloat); };
  const auto memory = [&] {
    return owned.batches()[core::BatchIndex(0)].part(kGradient, 0, 1).view({-1});
  };
  const at::Tensor before = row(0.1, at::kFloat);
  accumulate(kSingle, before, 1);
  EXPECT_FALSE(owned.gradient_factor().defined());
  owned.scale_gradients(factor(0.3));
  EXPECT_TRUE(memory().equal(before));
  EXPECT_EQ(owned.gradient_factor().item<float>(), 0.3F);
  EXPECT_THROW(owned.accumulate(kSingle, 0, before, 1), core::InternalError);
  owned.scale_gradients(factor(0.7));
  EXPECT_TRUE(memory().equal(before.mul(0.3F)));
  EXPECT_TRUE(gradient(kSingle).equal(before.mul(0.3F).mul(0.7F)));
  EXPECT_FALSE(owned.gradient_factor().defined());
  owned.scale_gradients(factor(0.5));
  const double norm = owned.norms()[0].item<double>();
  EXPECT_EQ(norm, memory().norm(2, at::kDouble).item<double>());
  EXPECT_TRUE(memory().equal(before.mul(0.3F).mul(0.7F).mul(0.5F)));
}

TEST_F(OwnedTest, DropsAFactorOfGradientsThatAreCleared) {
  accumulate(kOther, row(1, at::kFloat), 1);
  owned.scale_gradients(at::full({}, std::numeric_limits<double>::quiet_NaN(), at::kFloat));
  owned.set_filled(kOther, false);
  owned.multiply_factor_in();
  EXPECT_TRUE(gradient(kOther).equal(row(1, at::kFloat)));
  accumulate(kOther, row(2, at::kFloat), 1);
  EXPECT_TRUE(gradient(kOther).equal(row(2, at::kFloat)));
}

TEST_F(OwnedTest, TakesAParameterInPiecesThatEndInsideAMatrix) {
  poison();
  const at::Tensor values = at::arange(12, at::TensorOptions().dtype(at::kFloat));
  for (int i = 0; i < 2; ++i) {
    owned.accumulate(kStack, 0, values.narrow(0, 0, 7), 1);
    owned.accumulate(kStack, 7, values.narrow(0, 7, 5), 1);
    owned.set_filled(kStack, true);
  }
  EXPECT_TRUE(gradient(kStack).equal(at::add(values, values)));
}

// 0.1 in bf16 has 8 bits; sums of a hundred of them in bf16 would stop growing.
TEST_F(OwnedTest, AccumulatesABf16WireInFp32) {
  const at::Tensor wire = at::full({6}, 0.1, at::TensorOptions().dtype(at::kBFloat16));
  for (int i = 0; i < 1000; ++i) accumulate(kSingle, wire, 1);
  EXPECT_NEAR(gradient(kSingle)[0].item<double>(), 1000 * wire[0].item<double>(), 1e-2);
}

TEST_F(OwnedTest, FindsTheNormOfEachParameterAlsoBeyondTheRangeOfFp32) {
  accumulate(kSingle, at::full({6}, 1e-30), 1);
  accumulate(kOther, at::full({6}, 1e30), 1);
  accumulate(kStack, at::arange(1, 13, at::TensorOptions().dtype(at::kFloat)), 1);
  const at::Tensor norms = owned.norms();
  ASSERT_EQ(norms.sizes().vec(), (std::vector<std::int64_t>{3}));
  const auto* found = norms.const_data_ptr<double>();
  EXPECT_NEAR(found[0] / (std::sqrt(6) * 1e-30), 1, 1e-6);
  EXPECT_DOUBLE_EQ(found[1], std::sqrt(650));  // 1 to 12
  EXPECT_NEAR(found[2] / (std::sqrt(6) * 1e30), 1, 1e-6);
}

TEST_F(OwnedTest, HoldsNothingOfWhatAnotherRankOwns) {
  owned.set_filled(kElsewhere, true);
  EXPECT_FALSE(owned.filled(kElsewhere));
}

TEST_F(OwnedTest, AddsNamedTensorsOfZerosAndCountsThem) {
  constexpr std::int64_t kElements = 4 * 6;
  EXPECT_EQ(pool->current_bytes(), 2 * 4 * kElements);
  owned.add("momentum_buffer");
  EXPECT_EQ(pool->current_bytes(), 3 * 4 * kElements);
  EXPECT_TRUE(owned.of(kStack, "momentum_buffer").equal(at::zeros({2, 2, 3})));
}

TEST_F(OwnedTest, ExchangesTwoNamedTensors) {
  owned.add("mean");
  for (const ParameterIndex parameter : {kSingle, kOther, kStack}) {
    owned.of(parameter, kMaster).fill_(1 + parameter.value());
    owned.of(parameter, "mean").fill_(10 + parameter.value());
  }
  owned.exchange(kMaster, "mean");
  for (const ParameterIndex parameter : {kSingle, kOther, kStack}) {
    EXPECT_TRUE(owned.master(parameter).eq(10 + parameter.value()).all().item<bool>());
    EXPECT_TRUE(owned.of(parameter, "mean").eq(1 + parameter.value()).all().item<bool>());
  }
  EXPECT_THROW(owned.exchange(kMaster, "none"), core::InvalidArgument);
  EXPECT_EQ(owned.master(kOther)[0][0].item<float>(), 12);
}

// More elements than a piece, which no piece divides.
TEST_F(OwnedTest, ExchangesLargeTensorsInPieces) {
  const layout::Parameters large{{{"", {1, 2101, 2003}}, {}}};
  Owned of_large{large, {{kSingle}}, pool};
  of_large.add("mean");
  const at::Tensor master = at::arange(2101 * 2003, at::kFloat).view({2101, 2003});
  of_large.of(kSingle, kMaster).copy_(master);
  of_large.exchange(kMaster, "mean");
  EXPECT_TRUE(of_large.of(kSingle, "mean").equal(master));
  EXPECT_EQ(of_large.master(kSingle).abs().max().item<float>(), 0);
}

TEST_F(OwnedTest, AddsTensorsOfAnotherShape) {
  owned.add("one value a row", [](const layout::View& view) {
    return std::vector<std::int64_t>{view.rows, 1};
  });
  EXPECT_EQ(pool->current_bytes(), 2 * 4 * 24 + 4 * 8);
  EXPECT_EQ(owned.of(kSingle, "one value a row").sizes().vec(), (std::vector<std::int64_t>{2, 1}));
  owned.of(kStack, "one value a row").fill_(3);
  const OwnedBatch& batch = owned.batches()[core::BatchIndex(0)];
  EXPECT_EQ(batch.part("one value a row", 1, 2).sizes().vec(),
            (std::vector<std::int64_t>{2, 2, 1}));
  EXPECT_EQ(batch.tensors.at("one value a row").sum().item<float>(), 4 * 3);
  owned.remove("one value a row");
  EXPECT_EQ(pool->current_bytes(), 2 * 4 * 24);
}

// Lanes publish and route while the host adds a mean, or removes one.
TEST_F(OwnedTest, AddsAndRemovesNamesWhileLanesUseMastersAndGradients) {
  owned.of(kStack, kMaster).fill_(3);
  accumulate(kOther, at::zeros({6}), 1);
  std::atomic<bool> ends = false;
  std::atomic<int> num_uses = 0;
  std::jthread lane([&] {
    for (; !ends; ++num_uses) {
      EXPECT_EQ(owned.master(kStack).const_data_ptr<float>()[11], 3);
      owned.accumulate(kOther, 0, at::ones({6}), 1);
    }
  });
  int num_names = 0;
  for (; num_names < 200 || num_uses < 200; ++num_names) {
    owned.add("mean " + std::to_string(num_names));
    if (num_names % 3 > 0) owned.remove("mean " + std::to_string(num_names - 1));
  }
  ends = true;
  lane.join();
  EXPECT_EQ(gradient(kOther)[5].item<int>(), num_uses);
  EXPECT_TRUE(owned.has_name("mean " + std::to_string(num_names - 1)));
}

TEST_F(OwnedTest, RefusesAnUnknownNameEvenWhereItOwnsNothing) {
  Owned nothing(all, {}, pool);
  for (Owned* holder : {&owned, &nothing}) {
    try {
      holder->of(kElsewhere, "variance");
      ADD_FAILURE() << "expected an error";
    } catch (const core::InvalidArgument& error) {
      EXPECT_STREQ(error.what(),
                   "owned tensors: name: expected one of master, gradient; got 'variance'");
    }
  }
}

}  // namespace
}  // namespace dmuon::wire
