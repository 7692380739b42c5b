#include "dmuon/optim/rules/adamuon.h"

#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

// AdaMuon's formulas, element by element in fp64.
void plain_adamuon_update(Plain* master, Plain* momentum, Plain* moment, const Plain& gradient,
                          const MuonOptions& options) {
  const PlainOptions plain = plain_options(options, static_cast<std::int64_t>(master->rows),
                                           static_cast<std::int64_t>(master->cols));
  const double mu = options.momentum;
  Plain signs = gradient;
  for (std::size_t i = 0; i < signs.values.size(); ++i) {
    double& m = momentum->values[i];
    m = mu * m + (1 - mu) * gradient.values[i];
    const double u = options.nesterov ? (1 - mu) * gradient.values[i] + mu * m : m;
    signs.values[i] = u > 0 ? 1 : u < 0 ? -1 : 0;
  }
  PlainOptions of_signs = plain;
  of_signs.momentum = 0;
  Plain nothing = signs;
  Plain update = plain_orthogonalised(&nothing, signs, of_signs);
  double squares = 0;
  for (std::size_t i = 0; i < update.values.size(); ++i) {
    double& a = update.values[i];
    double& v = moment->values[i];
    v = options.beta2 * v + (1 - options.beta2) * a * a;
    a /= std::sqrt(v) + 1e-8;
    squares += a * a;
  }
  const auto side = static_cast<double>(std::min(master->rows, master->cols));
  const double scale = plain.adjusted_lr * std::sqrt(side) / (std::sqrt(squares) + 1e-8);
  for (std::size_t i = 0; i < update.values.size(); ++i) {
    double& w = master->values[i];
    w = w * (1 - options.lr * options.weight_decay) - scale * update.values[i];
  }
}

TEST(AdaMuon, EqualsItsFormulasElementByElement) {
  for (const bool nesterov : {true, false}) {
    for (const auto& [rows, cols] : {std::pair{5, 5}, {3, 8}, {9, 4}, {1, 6}, {6, 1}}) {
      MuonOptions of = with_second_moment();
      of.nesterov = nesterov;
      constexpr std::int64_t kBatch = 2;
      const at::Tensor master = random_tensor({kBatch, rows, cols}, 1);
      const at::Tensor momentum = at::zeros_like(master);
      const at::Tensor moment = at::zeros_like(master);
      std::vector<std::array<Plain, 3>> plain;
      for (std::int64_t i = 0; i < kBatch; ++i)
        plain.push_back({plain_of(master[i]), plain_of(momentum[i]), plain_of(moment[i])});
      for (unsigned step = 0; step < 3; ++step) {
        const at::Tensor gradient = random_tensor({kBatch, rows, cols}, 10 + step);
        muon_update(master, momentum, gradient, group_of("adamuon", of), kApplies, 1, false, {},
                    {moment});
        for (std::int64_t i = 0; i < kBatch; ++i) {
          auto& [of_master, of_momentum, of_moment] = plain[static_cast<std::size_t>(i)];
          plain_adamuon_update(&of_master, &of_momentum, &of_moment, plain_of(gradient[i]), of);
          // An element near zero is divided by its own size.
          EXPECT_LE(largest_difference(master[i], of_master), 1e-3) << rows << ", step " << step;
          EXPECT_LE(largest_difference(momentum[i], of_momentum), 2e-6);
          EXPECT_LE(largest_difference(moment[i], of_moment), 1e-5);
        }
      }
    }
  }
}

// As Muon does: a step that goes wrong is seen.
TEST(AdaMuon, MakesWeightsNanWhereMomentumIs) {
  const at::Tensor master = random_tensor({5, 8}, 1);
  const at::Tensor momentum = at::zeros_like(master);
  momentum[2][3] = std::numeric_limits<float>::quiet_NaN();
  muon_update(master, momentum, random_tensor({5, 8}, 2), group_of("adamuon", with_second_moment()),
              kApplies, 1, false, {}, {at::zeros_like(master)});
  EXPECT_TRUE(master.isnan().all().item<bool>());
}

}  // namespace
}  // namespace dmuon::optim
