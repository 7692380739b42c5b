#include "dmuon/optim/row_factors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "dmuon/core/error.h"

namespace dmuon::optim {
namespace {

using core::ParameterIndex;

// Of two ranks. Parameters 0, 1 and 3 share a batch of 2 x 3 matrices; 1 is a stack of two, and
// parameter 2 is another rank's.
class RowFactorsTest : public testing::Test {
 protected:
  RowFactorsTest() {
    for (const auto& [name, tensor] : batch().tensors)
      tensor.copy_(at::arange(1, tensor.numel() + 1, at::kFloat).view(tensor.sizes()));
  }

  const wire::OwnedBatch& batch() { return owned.batches()[core::BatchIndex(0)]; }
  void expect_refused(const RowFactors& factors) {
    EXPECT_THROW(check_row_factors(factors, owned, all), core::InvalidArgument);
  }

  static constexpr ParameterIndex kStack{1};
  const layout::Parameters all{
      {{"", {1, 2, 3}}, {}}, {{"", {2, 2, 3}}, {}}, {{"", {1, 9, 9}}, {}}, {{"", {1, 2, 3}}, {}}};
  wire::Owned owned{all,
                    {{ParameterIndex(0), kStack, ParameterIndex(3)}},
                    std::make_shared<wire::BufferPool>(c10::kCPU)};
};

TEST_F(RowFactorsTest, MultiplyTheRowsOfAStackOneAfterTheOther) {
  const at::Tensor before = batch().tensors.at(wire::kMaster).clone();
  const at::Tensor gradient = batch().tensors.at(wire::kGradient).clone();
  const RowFactors factors{{kStack, at::tensor({2.F, 1.F, 0.5F, 3.F})}};
  check_row_factors(factors, owned, all);
  scale_rows(batch(), factors);
  at::Tensor expected = before.clone();
  expected[1][0].mul_(2);
  expected[2][0].mul_(0.5);
  expected[2][1].mul_(3);
  EXPECT_TRUE(batch().tensors.at(wire::kMaster).equal(expected));
  EXPECT_TRUE(batch().tensors.at(wire::kGradient).equal(gradient));
}

TEST_F(RowFactorsTest, OfOneKeepEveryBit) {
  at::Tensor master = owned.of(kStack, wire::kMaster);
  master.fill_(std::numeric_limits<float>::denorm_min());
  master[0][0].fill_(1.F / 3);
  const at::Tensor before = master.clone();
  scale_rows(batch(), {{kStack, at::ones({4})}});
  EXPECT_TRUE(owned.of(kStack, wire::kMaster).equal(before));
}

TEST_F(RowFactorsTest, AreRefusedForOtherRowsDtypesAndOwners) {
  check_row_factors({}, owned, all);
  expect_refused({{kStack, at::ones({2})}});
  expect_refused({{kStack, at::ones({4, 1})}});
  expect_refused({{kStack, at::ones({4}, at::kDouble)}});
  expect_refused({{kStack, at::Tensor()}});
  expect_refused({{ParameterIndex(2), at::ones({9})}});
  expect_refused({{ParameterIndex(4), at::ones({2})}});
  expect_refused({{ParameterIndex(-1), at::ones({2})}});
}

}  // namespace
}  // namespace dmuon::optim
