#include "dmuon/engine/autograd.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace dmuon::engine {
namespace {

at::Tensor leaf() { return at::rand({3, 3}).set_requires_grad(true); }

// y = x W1 W2 with a watched x; each step of the backward writes its name.
struct Watched {
  std::vector<std::string> log;
  at::Tensor before = leaf();  // the weight of whoever made x
  at::Tensor first = leaf();
  at::Tensor second = leaf();
  std::vector<std::any> registrations;

  Watched() {
    const auto note = [&](const at::Tensor& weight, const std::string& name) {
      registrations.push_back(after_accumulation(weight, [this, name] { log.push_back(name); }));
    };
    note(before, "before");
    note(first, "first");
    note(second, "second");
  }

  at::Tensor forward() {
    const at::Tensor x = at::ones({3, 3}).mm(before);
    const at::Tensor inside = before_leaving_backward({x}, [this] { log.emplace_back("left"); })[0];
    return inside.mm(first).mm(second).sum();
  }
};

TEST(BeforeLeavingBackward, ComesAfterTheUnitsGradientsAndBeforeEarlierOnes) {
  Watched watched;
  watched.forward().backward();
  ASSERT_EQ(watched.log.size(), 4U);
  EXPECT_EQ(watched.log[2], "left");
  EXPECT_EQ(watched.log[3], "before");
}

TEST(BeforeLeavingBackward, WaitsForAllInputs) {
  // The second input is used last, so its gradient comes first.
  const at::Tensor a = leaf();
  const at::Tensor b = leaf();
  int calls = 0;
  bool arrived = false;
  const at::Tensor weight = leaf();
  const std::any registration = after_accumulation(weight, [&] { arrived = true; });
  const auto inputs = before_leaving_backward({a, b}, [&] {
    ++calls;
    EXPECT_TRUE(arrived);
  });
  inputs[0].mm(weight).mm(inputs[1]).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST(BeforeLeavingBackward, ChangesNeitherValuesNorGradients) {
  const at::Tensor a = leaf();
  const at::Tensor b = leaf();
  a.mm(b).square().sum().backward();
  const at::Tensor of_a = a.grad().clone();
  const at::Tensor of_b = b.grad().clone();
  a.mutable_grad().reset();
  b.mutable_grad().reset();
  const auto inputs = before_leaving_backward({a, b}, [] {});
  EXPECT_TRUE(inputs[0].equal(a));
  EXPECT_TRUE(inputs[0].requires_grad());
  inputs[0].mm(inputs[1]).square().sum().backward();
  EXPECT_TRUE(a.grad().equal(of_a));
  EXPECT_TRUE(b.grad().equal(of_b));
}

TEST(BeforeLeavingBackward, ComesOnceEvenWhereAnInputIsUnused) {
  for (const std::size_t used : {0U, 1U}) {
    const std::vector<at::Tensor> leaves{leaf(), leaf()};
    const std::vector<at::Tensor> made{leaves[0].mul(2), leaves[1].mul(2)};
    std::vector<int> arrived(2);
    std::vector<std::any> registrations;
    for (const std::size_t i : {0U, 1U})
      registrations.push_back(after_accumulation(leaves[i], [&arrived, i] { ++arrived[i]; }));
    int calls = 0;
    const auto inputs = before_leaving_backward(made, [&] { ++calls; });
    inputs[used].sum().backward({}, /*retain_graph=*/true);
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(arrived[used], 1);
    EXPECT_EQ(arrived[1 - used], 0) << "the backward has gone on behind an input that is unused";
    inputs[0].mm(inputs[1]).sum().backward();
    EXPECT_EQ(calls, 2);
  }
}

TEST(BeforeLeavingBackward, LetsWhatItThrowsLeaveTheBackward) {
  const at::Tensor a = leaf();
  const auto inputs =
      before_leaving_backward({a}, [] { throw std::runtime_error("from the callback"); });
  EXPECT_THROW(inputs[0].sum().backward(), std::runtime_error);
}

TEST(AfterAccumulation, ComesOnceABackwardHoweverOftenAWeightIsUsed) {
  const at::Tensor weight = leaf();
  int calls = 0;
  const std::any registration = after_accumulation(weight, [&] {
    ++calls;
    EXPECT_TRUE(weight.grad().defined());
  });
  weight.mm(weight).sum().backward();
  EXPECT_EQ(calls, 1);
  weight.sum().backward();
  EXPECT_EQ(calls, 2);
}

TEST(AfterAccumulation, LivesAsLongAsItsRegistration) {
  const at::Tensor weight = leaf();
  int calls = 0;
  std::any registration = after_accumulation(weight, [&] { ++calls; });
  registration.reset();
  weight.sum().backward();
  EXPECT_EQ(calls, 0);
}

TEST(OnGradientOf, ComesBeforeTheGradientIsUsed) {
  const at::Tensor weight = leaf();
  bool used = false;
  int calls = 0;
  const std::any registration = after_accumulation(weight, [&] { used = true; });
  const at::Tensor output = at::ones({3, 3}).mm(weight);
  on_gradient_of(output, [&] {
    ++calls;
    EXPECT_FALSE(used);
  });
  output.sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(used);
}

TEST(InBackward, IsTrueInsideOnly) {
  EXPECT_FALSE(in_backward());
  const at::Tensor weight = leaf();
  bool inside = false;
  const at::Tensor output = weight.sum();
  on_gradient_of(output, [&] { inside = in_backward(); });
  output.backward();
  EXPECT_TRUE(inside);
  EXPECT_FALSE(in_backward());
}

TEST(AtEndOfBackward, ComesOnceAfterAllGradients) {
  const at::Tensor weight = leaf();
  const at::Tensor output = weight.sum();
  int calls = 0;
  on_gradient_of(output, [&] {
    at_end_of_backward([&] {
      ++calls;
      EXPECT_TRUE(weight.grad().defined());
    });
  });
  output.backward();
  EXPECT_EQ(calls, 1);
}

TEST(AtEndOfBackward, IsDestroyedUncalledWhereTheBackwardRaises) {
  const auto token = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = token;
  int calls = 0;
  const at::Tensor weight = leaf();
  {
    const at::Tensor middle = weight.mul(2);
    on_gradient_of(middle, [] { throw std::runtime_error("a failing backward"); });
    const at::Tensor output = middle.sum();
    std::shared_ptr<int> moved = token;
    on_gradient_of(output, [&calls, &moved] {
      at_end_of_backward([&calls, held = std::move(moved)] { ++calls; });
    });
    EXPECT_THROW(output.backward(), std::runtime_error);
  }
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(alive.use_count(), 1);  // `token` alone
}

}  // namespace
}  // namespace dmuon::engine
