#include "dmuon/optim/rules/normuon.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

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
        muon_update(master, momentum, gradient, group_of("normuon", with_second_moment()), kApplies,
                    1, transposed, {}, {moment});
        for (std::int64_t i = 0; i < kBatch; ++i) {
          const auto at = static_cast<std::size_t>(i);
          plain_normuon_update(&masters[at], &momenta[at], &moments[at], plain(gradient, i),
                               with_second_moment());
          EXPECT_LE(largest_difference(stored(master[i], transposed), masters[at]), 5e-5)
              << rows << " x " << cols << ", step " << step;
          const Plain of_rows{masters[at].rows, 1, moments[at]};
          EXPECT_LE(largest_difference(stored(moment[i], transposed), of_rows), 1e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::optim
