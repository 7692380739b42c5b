#include "dmuon/engine/unit.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <limits>

#include "dmuon/core/error.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

const layout::Parameters kParameters{{{"", {1, 2, 3}, 0}, core::Slot(0)},
                                     {{"", {1, 4, 2}, 0}, core::Slot(0)}};

// A unit of two parameters, with weights of ones.
struct Bound {
  std::shared_ptr<wire::BufferPool> pool = std::make_shared<wire::BufferPool>(c10::kCPU);
  wire::UnitBuffers buffers;
  Unit unit;
  std::vector<at::Tensor> parameters;
  int num_gradients = 0;

  Bound(at::ScalarType compute, at::ScalarType reduce)
      : buffers("block",
                layout::pack(kParameters, layout::leaves_of(kParameters), UnitIndex(0), {1, 1},
                             /*pads=*/false),
                pool, compute, reduce),
        unit(layout::leaves_of(kParameters), &buffers) {
    for (const at::Tensor& weight : unit.weight_tensors()) {
      parameters.push_back(weight.set_requires_grad(true));
    }
    unit.bind(parameters, [this] { ++num_gradients; });
    unit.weights().allocate();
    unit.weights().flat().fill_(1);
    // Buffers are handed out as they are: what a unit does not write must not be read.
    wire::PackedBuffer dirty(pool, unit.packing().num_elements, reduce);
    dirty.allocate();
    dirty.flat().fill_(std::numeric_limits<double>::quiet_NaN());
  }

  at::Tensor gradient(int place) {
    const layout::Segment part = unit.packing().parameters[layout::PackedIndex(place)].in_unit;
    return unit.gradients()
        .slice(part.begin, part.end)
        .view(kParameters[ParameterIndex(place)].view.sizes())
        .to(at::kFloat);
  }

  // d/dW sum(factor * W) = factor
  void backward(std::size_t place, double factor) {
    parameters[place].mul(factor).sum().backward();
  }
};

at::Tensor all(int place, double value) {
  return at::ones(kParameters[ParameterIndex(place)].view.sizes()).mul(value);
}

TEST(Unit, TakesGradientsWithoutCopiesWhereDtypesAgree) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Bound bound(dtype, dtype);
    bound.unit.expect_gradients();
    bound.backward(0, 2);
    bound.backward(1, 3);
    EXPECT_TRUE(same_values(bound.gradient(0), all(0, 2)));
    EXPECT_TRUE(same_values(bound.gradient(1), all(1, 3)));
    EXPECT_EQ(bound.unit.num_gradient_copies(), 0);
    EXPECT_EQ(bound.num_gradients, 2);
  }
}

TEST(Unit, CastsGradientsToTheWireAndCountsThem) {
  Bound bound(at::kBFloat16, at::kFloat);
  bound.unit.expect_gradients();
  bound.backward(0, 2);
  EXPECT_EQ(bound.unit.num_gradient_copies(), 1);
  bound.backward(1, 3);
  EXPECT_EQ(bound.unit.num_gradient_copies(), 2);
  EXPECT_TRUE(same_values(bound.gradient(0), all(0, 2)));
  EXPECT_TRUE(same_values(bound.gradient(1), all(1, 3)));
  // The parameter keeps no second copy.
  EXPECT_FALSE(bound.parameters[0].grad().defined());
}

TEST(Unit, AddsASecondAccumulation) {
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    Bound bound(compute, at::kFloat);
    bound.unit.expect_gradients();
    bound.backward(0, 2);
    bound.unit.expect_gradients();
    bound.backward(0, 5);
    EXPECT_TRUE(same_values(bound.gradient(0), all(0, 7)));
  }
}

// In bf16 256 + 1 is 256 again.
TEST(Unit, AddsCastGradientsInTheWiresDtype) {
  Bound bound(at::kBFloat16, at::kFloat);
  bound.backward(0, 256);
  bound.backward(0, 1);
  EXPECT_TRUE(same_values(bound.gradient(0), all(0, 257)));
}

TEST(Unit, TakesGradientsThatAutogradPutElsewhere) {
  Bound bound(at::kFloat, at::kFloat);
  bound.backward(0, 2);  // unannounced
  EXPECT_EQ(bound.unit.num_gradient_copies(), 1);
  bound.backward(0, 5);
  EXPECT_EQ(bound.unit.num_gradient_copies(), 1);
  EXPECT_TRUE(same_values(bound.gradient(0), all(0, 7)));
}

TEST(Unit, TakesTheSumOfABackwardThatKeepsItsGraph) {
  Bound bound(at::kFloat, at::kFloat);
  bound.unit.expect_gradients();
  for (int i = 0; i < 2; ++i) {
    bound.parameters[0].mul(2).sum().backward({}, std::nullopt, /*create_graph=*/true);
  }
  EXPECT_TRUE(same_values(bound.gradient(0), all(0, 4)));
}

TEST(Unit, CountsMissingGradientsAsZeros) {
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    for (const bool announced : {true, false}) {
      Bound bound(compute, at::kFloat);
      if (announced) bound.unit.expect_gradients();
      bound.backward(1, 3);
      EXPECT_FALSE(bound.unit.arrived(layout::PackedLeafIndex(0)));
      EXPECT_TRUE(bound.unit.arrived(layout::PackedLeafIndex(1)));
      bound.unit.fill_missing_gradients();
      EXPECT_TRUE(same_values(bound.gradient(0), all(0, 0)));
      EXPECT_TRUE(same_values(bound.gradient(1), all(1, 3)));
    }
  }
}

TEST(Unit, SendsZerosWhereNoGradientCame) {
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    Bound bound(compute, at::kFloat);
    bound.unit.fill_missing_gradients();
    EXPECT_TRUE(same_values(bound.gradient(0), all(0, 0)));
    EXPECT_TRUE(same_values(bound.gradient(1), all(1, 0)));
  }
}

TEST(Unit, LeavesTheGradientOfAFrozenParameterAlone) {
  Bound bound(at::kFloat, at::kFloat);
  bound.parameters[0].set_requires_grad(false);
  bound.unit.expect_gradients();
  EXPECT_FALSE(bound.parameters[0].grad().defined());
  bound.backward(1, 3);
  bound.unit.fill_missing_gradients();
  EXPECT_TRUE(same_values(bound.gradient(0), all(0, 0)));
}

TEST(Unit, ForgetsGradientsThatItDrops) {
  Bound bound(at::kFloat, at::kFloat);
  bound.unit.expect_gradients();
  bound.backward(0, 2);
  bound.unit.hand_over_gradients();
  bound.unit.gradients().release();
  EXPECT_FALSE(bound.unit.arrived(layout::PackedLeafIndex(0)));
  EXPECT_FALSE(bound.unit.gradients().allocated());
  EXPECT_FALSE(bound.parameters[0].grad().defined());
  bound.unit.expect_gradients();
  bound.backward(0, 5);
  EXPECT_TRUE(same_values(bound.gradient(0), all(0, 5)));
}

TEST(Unit, ComputesWithWeightsThatReturnedBeforeItsBackward) {
  Bound bound(at::kFloat, at::kFloat);
  const at::Tensor input = at::ones({3, 3}).set_requires_grad(true);
  const at::Tensor output = bound.parameters[0].mm(input).sum();
  bound.unit.weights().release();
  bound.unit.weights().allocate();
  bound.unit.weights().flat().fill_(4);
  output.backward();
  EXPECT_TRUE(same_values(input.grad(), at::ones({3, 3}).mul(8)));  // two rows of fours
}

TEST(Unit, ThrowsWhereABackwardMeetsFreedWeights) {
  Bound bound(at::kFloat, at::kFloat);
  const at::Tensor input = at::ones({3, 3}).set_requires_grad(true);
  const at::Tensor output = bound.parameters[0].mm(input).sum();
  bound.unit.weights().release();
  EXPECT_THROW(output.backward(), c10::Error);
}

TEST(Unit, IsBoundOnceToAllItsParameters) {
  Bound bound(at::kFloat, at::kFloat);
  EXPECT_THROW(bound.unit.bind(bound.parameters, [] {}), core::InternalError);
  Unit other(layout::leaves_of(kParameters), &bound.buffers);
  EXPECT_THROW(other.bind({bound.parameters[0]}, [] {}), core::InternalError);
}

}  // namespace
}  // namespace dmuon::engine
