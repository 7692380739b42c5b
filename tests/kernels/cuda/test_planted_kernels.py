"""Bugs that are planted in a copy of the kernels' sources: the tests find each, and none in the sources as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "build/release/tests/kernels/cuda"
SOURCES = "src/dmuon/kernels/cuda"

pytestmark = pytest.mark.skipif(
    not (BUILT / "kernels_cuda_test").exists(), reason="the CUDA kernels' tests are not built: there is no nvcc"
)

# Name, file, text that occurs once, and what replaces it.
MOVE_WEIGHTS = [
    ("nothing", "move_weights.h", "", ""),
    ("one_column_more", "move_weights.h", "col + i < p_.cols", "col + i <= p_.cols"),
    ("fours_past_the_row", "move_weights.h", "col + 4 <= p_.cols", "col < p_.cols"),
    ("one_row_more", "move_weights.h", "row < p_.rows", "row <= p_.rows"),
    ("last_four_left_out", "move_weights.h", "(p.cols + p.width - 1) / p.width", "p.cols / p.width"),
    ("stride_of_the_other_matrix", "move_weights.h", "row * p_.u_row_stride", "row * p_.w_row_stride"),
    (
        "batch_stride_of_the_other_matrix",
        "move_weights.h",
        "outer_ * p.u_batch",
        "outer_ * p.w_batch",
    ),
    ("moves_always", "move_weights.h", "machine::load_u8(p.applies) == 0", "false"),
    (
        "fused",
        "move_weights.h",
        "decay_ * w + factor_ * Format::wide(u)",
        "__builtin_fmaf(decay_, w, factor_ * Format::wide(u))",
    ),
    ("lanes_swapped", "move_weights.h", "moved(four[i], update[i])", "moved(four[i], update[i ^ 1])"),
    (
        "bf16_read_as_fp16",
        "formats.h",
        "return machine::float_of_bf16(half);",
        "return machine::float_of_f16(half);",
    ),
    ("one_thread_less", "move_weights.h", "block_x() * kMoveWeightsThreads", "block_x() * (kMoveWeightsThreads - 1)"),
    ("a_quarter_of_a_block", "move_weights.h", "machine::block_x() * 4 * kMove", "machine::block_x() * kMove"),
    ("entries_twice", "move_weights.h", "unit + i * kMoveWeightsThreads", "unit + i / 2 * kMoveWeightsThreads"),
    ("decay_for_the_factor", "move_weights.h", "load_f32(p.factor)", "load_f32(p.decay)"),
    ("scale_of_all_left_out", "move_weights.h", "(p.factor) * p.scale", "(p.factor)"),
    ("scale_of_the_first_matrix", "move_weights.h", "p.scales + machine::block_y() * p.scale_stride", "p.scales"),
    ("quotient_by_half", "quotient.h", "std::uint32_t{2} * ", ""),
    (
        "w_batch_in_32_bits",
        "move_weights.h",
        "outer_ * p.w_batch_stride",
        "int(outer_ * p.w_batch_stride)",
    ),
    (
        "u_batch_in_32_bits",
        "move_weights.h",
        "outer_ * p.u_batch_stride",
        "int(outer_ * p.u_batch_stride)",
    ),
    ("inner_stride_of_the_other_matrix", "move_weights.h", "inner_ * p.u_inner", "inner_ * p.w_inner"),
    ("blocks_of_columns_confused", "move_weights.h", "block_y() % p.inner", "block_y() / p.inner"),
    ("w_inner_in_32_bits", "move_weights.h", "inner_ * p.w_inner_stride", "int(inner_ * p.w_inner_stride)"),
    ("u_inner_in_32_bits", "move_weights.h", "inner_ * p.u_inner_stride", "int(inner_ * p.u_inner_stride)"),
    ("w_row_in_32_bits", "move_weights.h", "row * p_.w_row_stride", "int(row * p_.w_row_stride)"),
    ("u_row_in_32_bits", "move_weights.h", "row * p_.u_row_stride", "int(row * p_.u_row_stride)"),
    (
        "column_in_30_bits",
        "move_weights.h",
        "(unit - row * units_a_row_) * p_.width",
        "((unit - row * units_a_row_) * p_.width & 0x3fffffff)",
    ),
]
SCALARS = [
    ("nothing", "write_scalars.h", "", ""),
    ("one_more", "write_scalars.h", "i < p.count", "i <= p.count"),
    ("the_first_threads_alone", "write_scalars.h", "i += kScalarsThreads", "i += kMostScalars"),
    ("a_place_further", "write_scalars.h", "p.values[i]", "p.values[i ^ 1]"),
]
MULTIPLY = [
    ("nothing", "multiply.h", "", ""),
    ("factor_of_the_first_matrix", "multiply.h", "p.factors + machine::block_y() * p.factor_stride", "p.factors"),
    ("halves_swapped", "multiply.h", "product(pair >> 16) << 16", "product(pair & 0xffffU) << 16"),
    ("one_eight_more", "multiply.h", "eight < p.num_eights", "eight <= p.num_eights"),
    ("one_eight_left_out", "multiply.h", "eight >= p.num_eights", "eight >= p.num_eights - 1"),
    ("blocks_overlap", "multiply.h", "* kMultiplyThreads * kMultiplyEights", "* kMultiplyThreads"),
    (
        "matrix_in_32_bits",
        "multiply.h",
        "static_cast<std::int64_t>(machine::block_y()) * p.num_eights * 8",
        "machine::block_y() * p.num_eights * 8",
    ),
]
DIRECTION = [
    ("nothing", "direction.h", "", ""),
    ("padding_not_written", "direction.h", "num_fours_(p.x_rows *", "num_fours_(p.rows *"),
    ("reads_padding", "direction.h", "num_fours_ ? p_.cols - col : 0", "num_fours_ ? 4 : 0"),
    ("aligned_by_guess", "direction.h", "if (p_.in_fours)", "if (p_.cols % 4 == 0)"),
    ("scale_left_out_of_the_norm", "direction.h", "scaled * scaled", "d * d"),
    ("momentum_moves_always", "direction.h", "if (again_ || !applies_) return;", "if (again_) return;"),
    ("momentum_moves_twice", "direction.h", "if (again_ || !applies_) return;", "if (!applies_) return;"),
    (
        "words_read_early",
        "direction.h",
        "}\n    machine::barrier();\n    if (machine::thread() != 0)",
        "}\n    if (machine::thread() != 0)",
    ),
    (
        "no_fence_before_the_ticket",
        "direction.h",
        "if (machine::thread() == 0) {\n      machine::fence();",
        "if (machine::thread() == 0) {",
    ),
    ("last_block_too_early", "direction.h", "(2 * kWarps) + 1 ==", "(2 * kWarps) + 2 =="),
    ("ticket_kept", "direction.h", "machine::store_u32(ticket_word(), 0);", ""),
    ("guess_kept", "direction.h", "(again_ ? kMemoGuess : kMemoScale)", "kMemoScale"),
    ("guess_believed", "direction.h", "again.memo_ + kMemoScale)", "again.memo_ + kMemoGuess)"),
    ("parts_not_written_anew", "direction.h", "part += p.blocks_again", "part += p.num_parts"),
    ("no_barrier_between_parts", "direction.h", "add_part(part);\n      machine::barrier();", "add_part(part);"),
    ("a_block_for_each_part", "direction.h", "is_last_block(p.blocks_again)", "is_last_block(p.num_parts)"),
    ("one_warp_left_out", "direction.h", "w < kWarps", "w < kWarps - 1"),
    ("blocks_of_columns_confused", "direction.h", "matrix_ % p.inner_batch", "matrix_ / p.inner_batch"),
    ("eps_not_scaled", "direction.h", "scale_ * p_.eps", "p_.eps"),
    ("zero_matrix_divided", "direction.h", "norm == 0 ? 1.F : 1", "1"),
    ("other_end_at_a_half", "direction.h", "rest_ < 0.5F", "rest_ <= 0.5F"),
    ("scale_not_held", "direction.h", "exponent > 127 ? 127 : exponent", "exponent"),
    ("square_of_the_first_matrix", "direction.h", "p_.squares + matrix_", "p_.squares"),
    ("x_in_32_bits", "direction.h", "static_cast<std::int64_t>(matrix_) * p.x_rows", "matrix_ * p.x_rows"),
    ("row_in_32_bits", "direction.h", "row * p_.row_stride", "int(row * p_.row_stride)"),
    (
        "matrix_in_32_bits",
        "direction.h",
        "matrix_ % p.inner_batch * p.inner_stride",
        "int(matrix_ % p.inner_batch * p.inner_stride)",
    ),
    (
        "batch_in_32_bits",
        "direction.h",
        "matrix_ / p.inner_batch * p.batch_stride",
        "int(matrix_ / p.inner_batch * p.batch_stride)",
    ),
]
KERNEL = "product80.h"
SYMMETRIC = [
    ("nothing", KERNEL, "", ""),
    ("no_wait", KERNEL, "machine::wait_copies<kStages - 2>();", ""),
    ("waits_for_a_group_less", KERNEL, "wait_copies<kStages - 2>", "wait_copies<kStages - 1>"),
    ("no_barrier_after_the_wait", KERNEL, "machine::barrier();  // all have read the stage that is fetched now", ""),
    ("no_barrier_before_staging", KERNEL, "wait_copies<0>();\n    machine::barrier();\n  }", "wait_copies<0>();\n  }"),
    ("no_barrier_before_writing", KERNEL, "machine::barrier();\n    Result::template", "Result::template"),
    ("c_in_flight", KERNEL, "machine::wait_copies<0>();\n      machine::barrier();", "machine::barrier();"),
    ("reads_another_stage", KERNEL, "int at = (step - first) %", "int at = (step - first + 1) %"),
    ("fetches_a_step_too_far", KERNEL, "fetch(step + kStages - 1)", "fetch(step + kStages)"),
    ("a_step_left_out", KERNEL, "step < last; ++step", "step < last - 1; ++step"),
    ("reads_past_the_row", KERNEL, "const int left = p_.inner - k;", "const int left = p_.inner > k ? 8 : 0;"),
    ("one_row_more", KERNEL, "size - tile_row * kTile - row;", "size - tile_row * kTile - row + 1;"),
    ("parts_of_a_in_another_order", KERNEL, "k * 2 ^ lane / 16)", "k * 2 ^ lane / 8 % 2)"),
    ("half_of_b_twice", KERNEL, "b[j / 2][j % 2 * 2 + 1]}", "b[j / 2][j % 2 * 2]}"),
    ("rows_of_sums_swapped", KERNEL, "alpha * sums[i / 2][i % 2 * 2 + e]", "alpha * sums[i / 2][(i + 1) % 2 * 2 + e]"),
    ("b_is_taken_for_a", KERNEL, "p.one_operand && ", ""),
    ("batch_stride_of_the_other_operand", KERNEL, "matrix_ * p_.b_batch_stride", "matrix_ * p_.a_batch_stride"),
    ("batch_stride_of_out", KERNEL, "matrix_ * p_.c_batch_stride", "matrix_ * p_.out_batch_stride"),
    ("scale_of_the_first_matrix", KERNEL, "p_.scale + matrix_", "p_.scale"),
    ("a_diagonal_in_each_tile", KERNEL, "place.row == place.col && row", "row"),
    ("one_split_too_many", KERNEL, "shared_load(kTicketWord) + 1 !=", "shared_load(kTicketWord) !="),
    ("a_part_left_out", KERNEL, "part < p_.splits", "part < p_.splits - 1"),
    ("splits_overlap", KERNEL, "(split + 1) * steps / p_.splits", "(split + 1) * steps / p_.splits + 1"),
    (
        "parts_in_their_order_of_arrival",
        KERNEL,
        "machine::load_f32x4_l2(sums[i], mine + i * kThreads * 4);\n"
        "      for (int part = 1; part < p_.splits; ++part) {",
        "for (int part = 0; part < p_.splits; ++part) {\n      if (part == split_) continue;",
    ),
    ("tickets_remain", KERNEL, "machine::store_u32(p_.tickets + tile, 0)", ""),
    ("no_release", KERNEL, "machine::fence();\n      const", "const"),
    ("no_acquire", KERNEL, "machine::fence();\n      machine::shared_store", "machine::shared_store"),
    (
        "released_too_early",
        KERNEL,
        "machine::barrier();\n    if (machine::thread() == 0) {",
        "if (machine::thread() == 0) {",
    ),
    (
        "mirrored_to_its_own_place",
        "staged_tile.h",
        "place.col * kTile + chunk.row",
        "place.row * kTile + chunk.row",
    ),
    ("mirrored_rows_mixed", "staged_tile.h", "lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2", "lane"),
    ("asymmetric_on_the_diagonal", "staged_tile.h", "if (place.row == place.col) take_lower", "if (false) take_lower"),
    ("upper_triangle_on_the_diagonal", "staged_tile.h", "col + 2 * i + 1 <= row", "col + 2 * i + 1 > row"),
    ("eights_past_the_row", "staged_tile.h", "if (row < m && col + 8 <= m)", "if (row < m && col + 7 <= m)"),
    ("a_row_past_the_tile", "staged_tile.h", "place.row != place.col && row < m", "place.row != place.col && row <= m"),
    (
        "whole_tiles_mirrored_to_their_own_place",
        "staged_tile.h",
        "place.col * kTile * row_stride + place.row",
        "place.row * kTile * row_stride + place.row",
    ),
    ("whole_by_its_first_row", "staged_tile.h", "(place.row + 1) * kTile <= m", "place.row * kTile < m"),
    ("ends_above_the_diagonal", "staged_tile.h", "place.row != place.col || col <= row;", "true;"),
    ("an_end_past_the_column", "staged_tile.h", "place.col * kTile + col >= m", "place.col * kTile + col > m"),
    ("ends_in_each_tile", "staged_tile.h", "end == 0 || (m / 8 * 8) / kTile != place.row", "end == 0"),
    ("first_place_of_a_row", "triangle.h", "before(row) > index", "before(row) >= index"),
    ("bf16_multiplied_as_fp16", "formats.h", "machine::multiply_add_bf16", "machine::multiply_add_f16"),
]
HOPPER = "product90.h"
PARTS = "parts90.h"
SHARES = "shares.h"
SYMMETRIC90 = [
    ("nothing", HOPPER, "", ""),
    ("full_waits_for_two", HOPPER, "kFull + 2 * stage, 1)", "kFull + 2 * stage, 2)"),
    ("empty_waits_for_three", HOPPER, "kEmpty + 2 * stage, 4)", "kEmpty + 2 * stage, 3)"),
    ("no_fence_after_initialisation", HOPPER, "machine::mbarrier_init_fence();", ""),
    (
        "the_other_block_initialises_later",
        HOPPER,
        "machine::cluster_barrier();\n    machine::wait_for",
        "machine::barrier();\n    machine::wait_for",
    ),
    ("no_wait_for_the_kernel_before", HOPPER, "machine::wait_for_kernel_before();", ""),
    (
        "leaves_its_cluster",
        HOPPER,
        "for (const int end = fetched + kStages; fetched < end; ++fetched) wait_for_stage(fetched);",
        "",
    ),
    ("takes_too_many_registers", HOPPER, "take_registers<232>", "take_registers<240>"),
    ("a_is_half_of_b_everywhere", HOPPER, "return place.row == place.col;", "return true;"),
    ("b_is_taken_for_a", HOPPER, " || !p_.one_operand) return", ") return"),
    (
        "no_wait_for_an_empty_stage",
        HOPPER,
        "wait_for_stage(fetched);\n        machine::mbarrier_expect",
        "machine::mbarrier_expect",
    ),
    ("other_parity_of_empty", HOPPER, "(step / kStages & 1) ^ 1", "step / kStages & 1"),
    (
        "phases_begin_anew_with_a_share",
        HOPPER,
        "wait_for_stage(fetched);\n        machine::mbarrier_expect",
        "wait_for_stage(step - share.first);\n        machine::mbarrier_expect",
    ),
    ("no_expectation", HOPPER, "machine::mbarrier_expect(full, 4 * (one ? 2 : 3) * kOperand);", ""),
    ("expects_two_operands", HOPPER, "(one ? 2 : 3)", "2"),
    ("expects_three_operands", HOPPER, "(one ? 2 : 3)", "3"),
    ("half_of_b_in_the_others_place", HOPPER, "at + (1 + rank_) * kOperand", "at + (2 - rank_) * kOperand"),
    ("b_to_itself_alone", HOPPER, "machine::copy_tile_to_both(to", "machine::copy_tile(to"),
    ("a_to_both", HOPPER, "machine::copy_tile(to", "machine::copy_tile_to_both(to"),
    ("a_of_the_other_block", HOPPER, "2 * place.row + rank_, share", "2 * place.row + 1 - rank_, share"),
    ("boxes_swapped", HOPPER, "tile * kTile + box * kDepth", "tile * kTile + (kTransposed ? 1 - box : 0) * kDepth"),
    ("a_box_alone", HOPPER, "copy_tile(to + box * (kOperand / 2)", "copy_tile(to"),
    ("a_box_of_b_alone", HOPPER, "to_both(to + box * (kOperand / 2)", "to_both(to"),
    ("releases_its_own_stage_alone", HOPPER, "(step % kStages), rank)", "(step % kStages), machine::cluster_rank())"),
    ("releases_too_early", HOPPER, "if (adds) release(taken - 1);", "if (adds) release(taken);"),
    (
        "releases_what_is_multiplied",
        HOPPER,
        "machine::wgmma_wait<1>();\n      if (adds) release(taken - 1);",
        "if (adds) release(taken - 1);\n      machine::wgmma_wait<1>();",
    ),
    (
        "last_step_not_released",
        HOPPER,
        "machine::wgmma_wait<0>();\n    release(taken - 1);",
        "machine::wgmma_wait<0>();",
    ),
    (
        "no_wait_for_a_full_stage",
        HOPPER,
        "machine::mbarrier_wait(kFull + 2 * (taken % kStages), taken / kStages & 1);",
        "",
    ),
    ("other_parity_of_full", HOPPER, "taken / kStages & 1)", "(taken / kStages & 1) ^ 1)"),
    ("no_wgmma_fence", HOPPER, "machine::wgmma_fence();", ""),
    ("no_commit", HOPPER, "machine::wgmma_commit();", ""),
    (
        "sums_in_flight",
        HOPPER,
        "machine::wgmma_wait<0>();\n    release(taken - 1);",
        "release(taken - 1);",
    ),
    ("sums_not_cleared", HOPPER, "adds || k > 0", "true"),
    ("cleared_in_each_step", HOPPER, "adds || k > 0", "k > 0"),
    ("rows_of_the_first_warpgroup", HOPPER, "machine::thread() / 128 * (kOperand / 2)", "0"),
    ("a_of_the_first_block", HOPPER, "(one ? 1 + rank_ : 0)", "(one ? 1 : 0)"),
    ("too_near_along_inner", HOPPER, "kTransposedA ? 128 : 2;", "kTransposedA ? 64 : 2;"),
    ("too_near_along_inner_of_b", HOPPER, "kTransposedB ? 128 : 2;", "kTransposedB ? 64 : 2;"),
    ("a_step_left_out", HOPPER, "taken + shares_.num_steps()", "taken + shares_.num_steps() - 1"),
    (
        "a_warpgroup_meets_alone",
        PARTS,
        "named_barrier(1, kThreads",
        "named_barrier(1 + machine::thread() / 128, 128 % kThreads",
    ),
    ("any_part_changes_places", PARTS, "keeps = mine < 2", "keeps = true"),
    ("a_part_left_out", PARTS, "part < num_parts", "part < num_parts - 1"),
    ("its_own_part_twice", PARTS, "if (keeps && part == mine) continue;", ""),
    ("a_part_of_the_other_block", PARTS, "most_parts * 2 + rank)", "most_parts * 2)"),
    (
        "counts_before_all_have_stored",
        PARTS,
        "meet();\n    if (machine::thread() == 0)\n      machine::shared_store(kTicketWord",
        "if (machine::thread() == 0)\n      machine::shared_store(kTicketWord",
    ),
    (
        "reads_the_ticket_early",
        PARTS,
        "meet();\n    return machine::shared_load",
        "return machine::shared_load",
    ),
    ("no_release_or_acquire", PARTS, "atomic_add_fenced(ticket", "atomic_add(ticket"),
    ("tickets_remain", PARTS, "if (machine::thread() == 0) machine::store_u32(ticket, 0);", ""),
    ("one_ticket_for_both_blocks", PARTS, "tickets + 2 * cut + rank", "tickets + 2 * cut"),
    ("keeps_a_part_that_others_miss", PARTS, "add_ended(ticket, 0) != last", "add_ended(ticket, 0) == 0"),
    ("keeps_a_third_part", PARTS, "share.part >= 2 || ", ""),
    ("writes_upper_tiles", HOPPER, "? place.col > place.row :", "? false :"),
    ("stages_what_is_written", HOPPER, "Parts::meet();  // what was staged before has been written", ""),
    ("writes_what_is_staged", HOPPER, "      Parts::meet();\n      Result::template", "      Result::template"),
    ("c_past_its_rows", HOPPER, "!has_diagonal && is_whole(place)", "!has_diagonal"),
    ("c_in_flight", HOPPER, "machine::wait_copies<0>();", ""),
    ("row_stride_of_out", HOPPER, "i % 2 * 8 * p_.c_row_stride", "i % 2 * 8 * p_.out_row_stride"),
    ("batch_stride_of_out", HOPPER, "p_.c + matrix * p_.c_batch", "p_.c + matrix * p_.out_batch"),
    ("other_batch_stride_of_out", HOPPER, "p_.c + share.matrix * p_.c_batch", "p_.c + share.matrix * p_.out_batch"),
    ("a_diagonal_in_each_tile", HOPPER, "may_cross && row == col)", "row == col)"),
    ("a_diagonal_beside_it", HOPPER, "row == col + 1)", "row == col - 1)"),
    ("a_half_twice", HOPPER, "half * 64 + i * 2 + 1]", "i * 2 + 1]"),
    ("scale_of_the_first_matrix", HOPPER, "p_.scale + share.matrix", "p_.scale"),
    ("bf16_multiplied_as_fp16", "formats.h", "machine::multiply_64x256_bf16", "machine::multiply_64x256_f16"),
    ("pair_swapped", "formats.h", "machine::bf16_pair_of(low, high)", "machine::bf16_pair_of(high, low)"),
    ("a_unit_twice", SHARES, "unit_ += num_workers_;", "unit_ += num_workers_ - (unit_ > 0);"),
    ("whole_tiles_of_one_matrix", SHARES, "{unit / of_.num_whole,", "{0,"),
    ("a_share_past_its_tile", SHARES, "tile_end < end_ ? tile_end : end_", "end_"),
    ("a_run_too_long", SHARES, "begin_of(after % of_.num_runs + 1)", "begin_of(after % of_.num_runs + 1) + 1"),
    ("run_of_the_next_step", SHARES, "((std::int64_t{step} + 1) *", "((std::int64_t{step} + 2) *"),
    ("parts_by_their_run", SHARES, "% of_.num_runs - first_run", "% of_.num_runs"),
    ("a_part_too_many", SHARES, "- first_run + 1}", "- first_run + 2}"),
    ("runs_of_one_matrix", SHARES, "{(unit - num_whole()) / of_.num_runs,", "{0,"),
]
RESULTS, MOVED, STAGED = "results.h", "moved_tile.h", "staged_tile.h"
FULL = [
    ("nothing", RESULTS, "", ""),
    ("the_last_band_is_whole", RESULTS, "left < kBand ? left : kBand", "kBand"),
    ("columns_of_m", RESULTS, "(p.n + kTile - 1) / kTile", "(p.m + kTile - 1) / kTile"),
    ("moves_always", RESULTS, "machine::load_u8(p.weights.applies) != 0", "true"),
    ("b_is_taken_as_it_lies", KERNEL, "if (!Result::kIsSymmetric && p_.b_transposed)", "if (false)"),
    ("half_of_inner_twice", KERNEL, "transposed_word_of(k * 16 + lane % 16", "transposed_word_of(k * 16 + lane % 8"),
    ("columns_of_b_swapped", KERNEL, "2 * j + lane / 16", "2 * j + 1 - lane / 16"),
    ("reads_past_the_row_of_b", KERNEL, "const int left = p_.n - col;", "const int left = p_.n > col ? 8 : 0;"),
    ("a_row_of_b_too_many", KERNEL, "p_.inner - step * kDepth - row", "p_.inner - step * kDepth - row + 1"),
    ("b_has_m_rows", KERNEL, "p_.b_row_stride, p_.n, place_.col", "p_.b_row_stride, p_.m, place_.col"),
    ("c_has_m_columns", KERNEL, "p_.c_row_stride, p_.m, p_.n", "p_.c_row_stride, p_.m, p_.m"),
    ("a_row_past_the_matrix", STAGED, "row >= rows_left", "row > rows_left"),
    ("eights_past_the_row", STAGED, "col + 8 <= cols_left", "col + 7 <= cols_left"),
    ("whole_by_its_rows", STAGED, " && cols_left >= kTile", ""),
    ("an_end_left_out", STAGED, "col + e < cols_left", "col + e < cols_left - 1"),
    ("fused_without_the_scale_of_all", MOVED, "(p.factor) * p.scale", "(p.factor)"),
    ("scale_of_the_first_matrix", MOVED, "p.scales + matrix * p.scale_stride", "p.scales"),
    ("begins_at_the_first_matrix", MOVED, "p.first + matrix", "matrix"),
    ("blocks_of_columns_confused", MOVED, "matrix % p.inner_batch", "matrix / p.inner_batch"),
    ("whole_in_its_rows", MOVED, " && (place.col + 1) * kTile <= p.cols", ""),
    ("whole_in_its_columns", MOVED, "(place.row + 1) * kTile <= p.rows && ", ""),
    ("aligned_by_guess", MOVED, "p.in_fours && ", ""),
    ("moves_a_row_of_padding", MOVED, "row_ + row >= p_.rows", "row_ + row > p_.rows"),
    ("moves_a_column_of_padding", MOVED, "e < left", "e <= left"),
    ("moves_twice", MOVED, "i += kAtOnce", "i += 1"),
    ("lanes_swapped", MOVED, "e % 2 * 16", "(e + 1) % 2 * 16"),
    (
        "fused",
        MOVED,
        "decay_ * w + factor_ * Format::wide(static_cast<std::uint16_t>(half))",
        "__builtin_fmaf(decay_, w, factor_ * Format::wide(static_cast<std::uint16_t>(half)))",
    ),
]
FULL90 = [
    ("nothing", RESULTS, "", ""),
    ("moves_always", RESULTS, "machine::load_u8(p.weights.applies) != 0", "true"),
    ("columns_of_m", RESULTS, "(p.n + kTile - 1) / kTile", "(p.m + kTile - 1) / kTile"),
    ("applies_before_the_kernel_before", HOPPER, "machine::wait_for_kernel_before();\n    if (!Result", "if (!Result"),
    ("c_past_its_columns", HOPPER, "Result::kIsSymmetric || (place.col + 1) * kTile <= p_.n", "true"),
    ("c_has_m_columns", HOPPER, "p_.c_row_stride, p_.m, p_.n", "p_.c_row_stride, p_.m, p_.m"),
    ("a_box_of_b_missing", HOPPER, "box < (kTransposedB ? 2 : 1)", "box < 1"),
    ("b_is_taken_as_it_lies", HOPPER, "corner_of<kTransposedB>", "corner_of<false>"),
    (
        "b_as_a_lies",
        HOPPER,
        "multiply_64x256<kTransposedA, kTransposedB>",
        "multiply_64x256<kTransposedA, kTransposedA>",
    ),
    ("begins_at_the_first_matrix", MOVED, "p.first + matrix", "matrix"),
]
# Tests, the device that runs them, and the bugs.
DEVICE_80 = {"FAKE_CUDA_DEVICE": "80"}
SMALL_DEVICE_90 = {"FAKE_CUDA_DEVICE": "90", "FAKE_CUDA_MULTIPROCESSORS": "8"}
OF_TESTS = [
    ("MoveWeights*", DEVICE_80, MOVE_WEIGHTS),
    ("WriteScalars*", DEVICE_80, SCALARS),
    ("Multiply*", DEVICE_80, MULTIPLY),
    ("Direction*", DEVICE_80, DIRECTION),
    ("SymmetricTest*", DEVICE_80, SYMMETRIC),
    ("Symmetric90*", SMALL_DEVICE_90, SYMMETRIC90),
    ("FullTest*", DEVICE_80, FULL),
    ("Full90*", SMALL_DEVICE_90, FULL90),
]
PLANTED = [(tests, device, *planted) for tests, device, all_of_them in OF_TESTS for planted in all_of_them]


def driver(folder: Path, file: str, old: str, new: str) -> None:
    """Compiles the fake driver with a changed kernel."""
    copy = folder / SOURCES
    shutil.copytree(ROOT / SOURCES, copy)
    if old:
        text = (copy / file).read_text()
        (copy / file).write_text(text.replace(old, new))
    includes = [f"-I{folder}/src", f"-I{ROOT}/src", f"-I{ROOT}", f"-I{ROOT}/tests/kernels/cuda/emulator"]
    libraries = [f"{BUILT}/libcuda_fake.a", "-Wl,--no-whole-archive", f"{BUILT}/libcuda_emulator.a"]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1"), *includes]
    command += [str(ROOT / "tests/kernels/cuda/fake/registry.cpp"), "-Wl,--whole-archive", *libraries]
    subprocess.run(command, check=True)


def test_what_planted_bugs_replace_occurs_once():
    for _, _, _, file, old, _ in PLANTED:
        if old:
            assert (ROOT / SOURCES / file).read_text().count(old) == 1, f"{old!r} in {file}"


@pytest.mark.rarer(4)
@pytest.mark.parametrize(
    ("tests", "device", "name", "file", "old", "new"),
    PLANTED,
    ids=[f"{planted[0][:-1]}-{planted[2]}" for planted in PLANTED],
)
def test_a_planted_bug_is_found(tmp_path, tests, device, name, file, old, new):
    driver(tmp_path, file, old, new)
    done = subprocess.run(
        [BUILT / "kernels_cuda_test", "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={tests}"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), **device},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode == 0) == (not old), done.stdout
