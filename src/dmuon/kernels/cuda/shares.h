#pragma once

#include <cstdint>

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda::device {

/// A worker computes steps [first, last) of a tile at a time. If a tile has several parts,
/// their sums add up to the tile's.
struct Share {
  int matrix;
  int tile;
  int first;
  int last;
  int part;
  int num_parts;
};

/// The shares of one of several workers, in the order in which it computes them.
///
/// Each of a matrix's first num_whole tiles is one share. The steps of all others, one tile
/// after the other, are cut into num_runs equal runs; a run has a share of each tile that it
/// touches. Workers take whole tiles of all matrices in turns, then runs of all matrices. So a
/// tile's parts, and thereby its bits, depend neither on the batch nor on the number of workers.
class Shares {
 public:
  DMUON_DEVICE Shares(const SharesOf& of, int worker, int num_workers)
      : of_(of), num_workers_(num_workers), unit_(worker - num_workers) {}

  /// Moves to the next share. False after the last.
  DMUON_DEVICE bool next() {
    if (share_end_ == end_ && !next_unit()) return false;
    share_begin_ = share_end_;
    const int tile_end = share_begin_ / of_.num_steps * of_.num_steps + of_.num_steps;
    share_end_ = tile_end < end_ ? tile_end : end_;
    return true;
  }

  DMUON_DEVICE int num_steps() const { return share_end_ - share_begin_; }

  /// The current share: computed anew, so that it takes no registers meanwhile.
  DMUON_DEVICE Share share() const {
    const int unit = machine::from_here(unit_);
    if (unit < num_whole())
      return {unit / of_.num_whole, unit % of_.num_whole, 0, of_.num_steps, 0, 1};
    const int cut = share_begin_ / of_.num_steps;  // of the tiles that are cut
    const int begin = cut * of_.num_steps;
    const int first_run = run_of(begin);
    return {(unit - num_whole()) / of_.num_runs,
            of_.num_whole + cut,
            share_begin_ - begin,
            share_end_ - begin,
            (unit - num_whole()) % of_.num_runs - first_run,
            run_of(begin + of_.num_steps - 1) - first_run + 1};
  }

 private:
  DMUON_DEVICE int num_whole() const { return of_.batch * of_.num_whole; }
  // The steps of a matrix's tiles that are cut, one tile after the other.
  DMUON_DEVICE int cut_steps() const { return (of_.num_tiles - of_.num_whole) * of_.num_steps; }

  DMUON_DEVICE bool next_unit() {
    unit_ += num_workers_;
    share_end_ = 0;
    end_ = of_.num_steps;
    if (unit_ < num_whole()) return true;
    const int after = unit_ - num_whole();
    if (after >= of_.batch * of_.num_runs) return false;
    share_end_ = begin_of(after % of_.num_runs);
    end_ = begin_of(after % of_.num_runs + 1);
    return true;
  }

  // The first of the cut steps that the run has.
  DMUON_DEVICE int begin_of(int run) const {
    return static_cast<int>(std::int64_t{cut_steps()} * run / of_.num_runs);
  }
  // The run that has this one of the cut steps.
  DMUON_DEVICE int run_of(int step) const {
    return static_cast<int>(((std::int64_t{step} + 1) * of_.num_runs - 1) / cut_steps());
  }

  const SharesOf& of_;
  int num_workers_;
  int unit_;             // the whole tile or the run
  int end_ = 0;          // of the unit: in its tile, or in the cut steps
  int share_begin_ = 0;  // of the current share, likewise
  int share_end_ = 0;
};

}  // namespace dmuon::kernels::cuda::device
