#include "dmuon/optim/rules/normuon.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dmuon/core/error.h"
#include "dmuon/optim/muon_step.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

MuonOptions normuon_options() {
  MuonOptions options = muon(0.05);
  options.beta2 = 0.8;
  return options;
}

// NorMuon's formulas, element by element in fp64; rows are neurons.
void plain_normuon_update(Plain* master, Plain* momentum, std::vector<double>* moment,
                          const Plain& gradient, const MuonOptions& options) {
  const auto rows = static_cast<std::int64_t>(master->rows);
  const auto cols = static_cast<std::int64_t>(master->cols);
  const PlainOptions plain = plain_options(options, rows, cols);
  Plain update = plain_orthogonalised(momentum, gradient, plain);
  double before = 0;
  double after = 0;
  for (std::size_t i = 0; i < update.rows; ++i) {
    double squares = 0;
    for (std::size_t j = 0; j < update.cols; ++j) squares += update.at(i, j) * update.at(i, j);
    double& v = moment->at(i);
    v = options.beta2 * v + (1 - options.beta2) * squares / static_cast<double>(cols);
    for (std::size_t j = 0; j < update.cols; ++j) update.at(i, j) /= std::sqrt(v) + 1e-8;
    before += squares;
    for (std::size_t j = 0; j < update.cols; ++j) after += update.at(i, j) * update.at(i, j);
  }
  const double scale = plain.adjusted_lr * std::sqrt(before / std::max(after, 1e-16));
  for (std::size_t i = 0; i < update.values.size(); ++i) {
    double& w = master->values[i];
    w = w * (1 - options.lr * options.weight_decay) - scale * update.values[i];
  }
}

at::Tensor stored(const at::Tensor& matrix, bool transposed) {
  return transposed ? matrix.mT().contiguous() : matrix;
}

// Small matrices go together, larger ones one by one.
TEST(NorMuon, EqualsItsFormulasElementByElement) {
  for (const auto& [rows, cols] : {std::pair{5, 5}, {3, 8}, {9, 4}, {1, 6}, {6, 1}, {260, 258}}) {
    for (const bool transposed : {false, true}) {
      constexpr std::int64_t kBatch = 2;
      const at::Tensor master = stored(random_tensor({kBatch, rows, cols}, 1), transposed);
      const at::Tensor momentum = at::zeros_like(master);
      const at::Tensor moment = stored(at::zeros({kBatch, rows, 1}), transposed);
      const auto plain = [&](const at::Tensor& batch, std::int64_t i) {
        return plain_of(stored(batch[i], transposed));
      };
      std::vector<Plain> masters;
      std::vector<Plain> momenta;
      for (std::int64_t i = 0; i < kBatch; ++i) {
        masters.push_back(plain(master, i));
        momenta.push_back(plain(momentum, i));
      }
      std::vector<std::vector<double>> moments(kBatch, std::vector<double>(masters[0].rows));
      for (unsigned step = 0; step < 3; ++step) {
        const at::Tensor gradient =
            stored(random_tensor({kBatch, rows, cols}, 10 + step), transposed);
        muon_update(master, momentum, gradient, group_of("normuon", normuon_options()), kApplies, 1,
                    transposed, {}, {moment});
        for (std::int64_t i = 0; i < kBatch; ++i) {
          const auto at = static_cast<std::size_t>(i);
          plain_normuon_update(&masters[at], &momenta[at], &moments[at], plain(gradient, i),
                               normuon_options());
          EXPECT_LE(largest_difference(stored(master[i], transposed), masters[at]), 5e-5)
              << rows << " x " << cols << ", step " << step;
          const Plain of_rows{masters[at].rows, 1, moments[at]};
          EXPECT_LE(largest_difference(stored(moment[i], transposed), of_rows), 1e-5);
        }
      }
    }
  }
}

TEST(NorMuon, OfAZeroGradientDecaysAlone) {
  const at::Tensor master = random_tensor({1, 3, 4}, 1);
  const at::Tensor expected = master.mul(1 - 0.05 * 0.1);
  muon_update(master, at::zeros({1, 3, 4}), at::zeros({1, 3, 4}),
              group_of("normuon", normuon_options()), kApplies, 1, false, {},
              {at::zeros({1, 3, 1})});
  EXPECT_TRUE(master.allclose(expected, 1e-6, 0));
}

TEST(NorMuon, ThatDoesNotApplyChangesNothingWhateverTheGradientHolds) {
  const at::Tensor master = random_tensor({2, 3, 4}, 1);
  const at::Tensor momentum = random_tensor({2, 3, 4}, 2);
  const at::Tensor moment = random_tensor({2, 3, 1}, 4).square();
  const at::Tensor gradient = random_tensor({2, 3, 4}, 3);
  gradient[0][0][0] = NAN;
  gradient[1][2][3] = INFINITY;
  const auto all = [&] {
    return at::cat({master.flatten(), momentum.flatten(), moment.flatten()});
  };
  const at::Tensor before = all();
  muon_update(master, momentum, gradient, group_of("normuon", normuon_options()),
              at::logical_not(kApplies), 1, false, {}, {moment});
  EXPECT_TRUE(all().equal(before));
}

// Alone, among others, and in blocks of columns of a wider matrix.
TEST(NorMuon, GivesAMatrixTheSameBitsAloneAndInABatch) {
  for (const auto& [rows, cols] : {std::pair{4, 6}, {40, 70}, {300, 260}}) {
    for (const bool transposed : {false, true}) {
      const auto updated = [&](const at::Tensor& gradient, std::int64_t blocks) {
        const at::Tensor master = at::zeros_like(gradient);
        const at::Tensor momentum = at::zeros_like(gradient);
        const std::int64_t count = gradient.size(0);
        const at::Tensor moment = transposed ? at::zeros({count, 1, gradient.size(2)})
                                             : at::zeros({count, gradient.size(1), blocks});
        for (int step = 0; step < 2; ++step)
          muon_update(master, momentum, gradient, group_of("normuon", normuon_options()), kApplies,
                      blocks, transposed, {}, {moment});
        return master;
      };
      const at::Tensor gradient = random_tensor({3, rows, cols}, 1);
      const at::Tensor together = updated(gradient, 1);
      for (std::int64_t i = 0; i < 3; ++i)
        EXPECT_TRUE(updated(gradient.narrow(0, i, 1), 1).equal(together.narrow(0, i, 1)));
      const auto side_by_side = [&](const at::Tensor& batch) {
        return batch.transpose(0, 1).reshape({1, rows, 3 * cols});
      };
      EXPECT_TRUE(updated(side_by_side(gradient), 3).equal(side_by_side(together)));
    }
  }
}

TEST(NorMuon, RefusesSlicesAndStatesOfOtherSizes) {
  const NorMuon rule(normuon_options());
  const at::Tensor x = at::zeros({1, 3, 4});
  EXPECT_THROW(rule.direction({x, x, {x, x}, kApplies}), core::InvalidArgument);
  EXPECT_THROW(rule.move({x, x, {x, x}, kApplies}, x, 3, 4), core::InvalidArgument);
  const MuonGroup group = group_of("normuon", normuon_options());
  for (const std::vector<at::Tensor>& others :
       {std::vector<at::Tensor>{}, {x}, {at::zeros({1, 1, 4})}}) {
    EXPECT_THROW(muon_update(x, x.clone(), x.clone(), group, kApplies, 1, false, {}, others),
                 core::InvalidArgument);
  }
}

}  // namespace
}  // namespace dmuon::optim
