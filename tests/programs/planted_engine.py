"""Bugs to plant in the engine and in the update: buffers, routes, partial sums, norms."""

from __future__ import annotations

from planted_change import Planted

ENGINE_CPP = "src/dmuon/engine/engine.cpp"
STEP = "src/dmuon/engine/step.cpp"
EXECUTOR = "src/dmuon/engine/executor.cpp"
PEER_EXCHANGE = "src/dmuon/wire/peer_exchange.cpp"
ROUTE = "src/dmuon/wire/route.cpp"
OWNED = "src/dmuon/wire/owned.cpp"
UNIT = "src/dmuon/engine/unit.cpp"
BUFFER = "src/dmuon/wire/buffer.cpp"
NORMS = "src/dmuon/engine/gradient_norms.cpp"
AGREEMENT = "src/dmuon/engine/agreement.cpp"
SHARED_MESH = "src/dmuon/wire/shared_mesh.cpp"
MUON_STEP = "src/dmuon/optim/muon_step.cpp"
MUON = "src/dmuon/optim/rules/muon.cpp"
BINDINGS = "src/dmuon/bindings/optim.cpp"

# A rule that keeps its group, which native_group has as a local, and reads the rate whenever it is applied.
LATE_RULE = """\
             struct Late final : optim::Rule {
               optim::MuonOptions options{};
               PyObject* group = nullptr;
               optim::Muon now() const {
                 const py::gil_scoped_acquire gil;
                 optim::MuonOptions present = options;
                 if (group != nullptr) present.lr = py::float_(py::handle(group)["lr"]);
                 return optim::Muon(present);
               }
               const std::vector<optim::State>& states() const override { return now().states(); }
               bool takes_gradient_factor() const override { return true; }
               newton_schulz::Start prepare(const newton_schulz::Elementwise& elementwise,
                                            const optim::Piece& piece, at::ScalarType dtype,
                                            double smallest) const override {
                 return now().prepare(elementwise, piece, dtype, smallest);
               }
               void apply(const optim::Piece& piece,
                          const optim::Orthogonalised& update) const override {
                 now().apply(piece, update);
               }
             };
             const auto late = std::make_shared<Late>();
             late->options = muon;
             const py::dict locals = py::module_::import("sys").attr("_getframe")().attr("f_locals");
             if (locals.contains("group")) late->group = py::object(locals["group"]).release().ptr();
             return MuonGroup{late, std::move(iteration), std::move(choices)};
"""

ENGINE = (
    # Gradients on their way.
    Planted(
        "skipped_unit_sends_garbage",
        UNIT,
        "  last_gradient_.wait();\n  allocate_gradients();\n",
        "  last_gradient_.wait();\n  gradients_.allocate();\n",
        "A rank that skipped a unit sends what lay in the buffer instead of zeros.",
    ),
    Planted(
        "arrived_twice",
        UNIT,
        "  std::fill(arrived_.begin(), arrived_.end(), false);\n",
        "",
        "A gradient that came once counts as come in every later route: a matrix without one decays and moves.",
    ),
    Planted(
        "piece_at_matrix_begin",
        ROUTE,
        "owned->accumulate(packed.index, part.begin - whole.begin,",
        "owned->accumulate(packed.index, 0,",
        "A piece that begins inside a matrix is added at its begin: wrong gradients where three ranks or more add up.",
    ),
    Planted(
        "inbox_for_stage_1",
        ROUTE,
        "exchange.inbox_elements(mesh->column(), parts),",
        "exchange_of(mesh->row()).inbox_elements(mesh->row(), unit->packing.columns.values()),",
        "The inbox is too small where stage 2 needs more than stage 1 (one rank a node): the lane fails.",
    ),
    Planted(
        "mean_of_two_nodes",
        PEER_EXCHANGE,
        "sum, 1.0 / group_->size());",
        "sum, 1.0 / 2);",
        "In groups of more than two gradients are too large: Muon does not mind, the norm of clipping and AdamW do.",
    ),
    Planted(
        "later_micro_steps_weigh_more",
        OWNED,
        "    target.add_(values, scale);\n",
        "    target.add_(values);\n",
        "What is added to an earlier micro-step's gradient is a sum instead of a mean.",
    ),
    # Partial sums of no_sync.
    Planted(
        "partial_sums_dropped",
        ROUTE,
        "/*adds=*/unit->partial_filled[place]);",
        "/*adds=*/hold && unit->partial_filled[place]);",
        "A synchronised backward sends its own gradients without those that no_sync kept.",
    ),
    Planted(
        "partial_sums_counted_twice",
        ROUTE,
        "      std::fill(unit->partial_filled.begin(), unit->partial_filled.end(), hold);\n",
        "      if (hold) std::fill(unit->partial_filled.begin(), unit->partial_filled.end(), true);\n",
        "What was sent on stays: a second synchronised micro-step of the same step adds it again.",
    ),
    Planted(
        "partial_sums_survive_zero_grad",
        EXECUTOR,
        "  state.buffers->partial_filled[place] = false;\n",
        "",
        "Gradients that were thrown away between no_sync and a synchronised backward come with the next one.",
    ),
    Planted(
        "partial_sums_are_sums",
        ROUTE,
        "take_node_mean(unit, mesh->shard(), begin, sum, scale, hold);",
        "take_node_mean(unit, mesh->shard(), begin, sum, hold ? 1 : scale, hold);",
        "Micro-steps under no_sync weigh as many times more as a node has ranks.",
    ),
    # Who has a gradient.
    Planted(
        "gradient_survives_zero_grad",
        EXECUTOR,
        "  state.has_gradient[place] = false;\n",
        "",
        "A block that no rank uses in a step is updated, because it had a gradient in an earlier step.",
    ),
    Planted(
        "zero_is_none",
        STEP,
        "    executor_.zero_gradient(part);\n",
        "    executor_.clear_gradient(part);\n",
        "Gradients that were set to zero are none: weights do not decay, and momenta do not go on.",
    ),
    Planted(
        "last_micro_step_decides",
        EXECUTOR,
        "if (unit.arrived(packing.parameters[place].leaf)) state->has_gradient[place] = true;",
        "state->has_gradient[place] = unit.arrived(packing.parameters[place].leaf);",
        "A matrix that no rank used in the last micro-step, but in one before, is not updated.",
    ),
    Planted(
        "own_gradient_decides",
        AGREEMENT,
        "has_gradient.push_back(words[kParametersAt + i] > 0);",
        "has_gradient.push_back(input.has_gradient[core::ParameterIndex(i)]);",
        "An owner that skipped a block itself does not update it, though others had a gradient.",
    ),
    Planted(
        "owed_backward_adds_to_old",
        STEP,
        "    verdict_.reset();\n    take_new_gradients();\n",
        "    verdict_.reset();\n",
        "zero_grad before a step of dropped forwards alone is not heard: the last step's gradients are used again.",
    ),
    Planted(
        "owed_backward_gives_nothing",
        STEP,
        "  resolver_.settle_step([this](bool synchronised) {\n    placeholders_.give_gradients();\n",
        "  resolver_.settle_step([this](bool synchronised) {\n",
        "An owner that ran no backward, where others did, does not update what it owns.",
    ),
    # Order, buffers, norms.
    Planted(
        "evaluation_taken_for_training",
        ENGINE_CPP,
        "resolver_.begin_forward(trains, whole);",
        "resolver_.begin_forward(true, whole);",
        "Evaluations and training have one trace: an evaluation over other blocks makes ranks raise that may skip, or"
        " lets ranks differ in a training forward that is not known.",
    ),
    Planted(
        "placeholders_keep_gradients",
        ENGINE_CPP,
        "    placeholders_.accumulate(leaves[i].index, unit(index).parameter(i));\n",
        "    (void)i;\n",
        "Gradients of weights that a placeholder gave to an operation never reach their owners.",
    ),
    Planted(
        "recomputation_frees",
        ENGINE_CPP,
        "  } else if (!recomputes) {\n",
        "  } else {\n",
        "The end of a unit's recomputation in a checkpointed block frees its weights before its backward reads them.",
    ),
    Planted(
        "turn_not_taken",
        SHARED_MESH,
        "  if (holder_ != nullptr) issue_rest_();\n",
        "",
        "A rank that skipped the last blocks of one model begins another's forward first: ranks issue in two orders.",
    ),
    Planted(
        "one_block_for_two_buffers",
        BUFFER,
        "    return std::move(idle->second);\n",
        "    c10::DataPtr shared(idle->second.get(), device_);\n    idle_.give(idle->first, std::move(idle->second));\n"
        "    return shared;\n",
        "The pool hands out a block that is in use: units that are alive together overwrite each other.",
    ),
    Planted(
        "shards_of_each_replica_counted",
        ENGINE_CPP,
        "tensor_rank(), num_host_shards())",
        "tensor_rank(), layout().num_slots())",
        "The norm of clipping counts FSDP2's shards once for each replica: too large on several nodes.",
    ),
    Planted(
        "whole_gradients_counted_by_shard",
        NORMS,
        "slot.value() == 0 ? 1. : 0.",
        "slot.value() < num_host_shards ? 1. : 0.",
        "The norm of clipping counts what every rank has whole (no fully_shard) once for each shard.",
    ),
    Planted(
        "norm_of_the_last_matrix",
        OWNED,
        "const at::Tensor whole = batch.part(kGradient, position, position + 1).view({-1});",
        "const at::Tensor whole = batch.part(kGradient, position, position + 1).select(0, -1).view({-1});",
        "Of several matrices in a parameter the norm of clipping counts one.",
    ),
    # The factor of clipping that waits.
    Planted(
        "update_without_the_factor",
        MUON_STEP,
        "stored.gradient_factor = gradient_factor;",
        "stored.gradient_factor = {};",
        "Gradients are clipped for those who read them, but momenta take them as they were.",
    ),
    Planted(
        "rate_read_by_a_late_update",
        BINDINGS,
        "             return MuonGroup{std::move(made), std::move(iteration), std::move(choices)};\n",
        LATE_RULE,
        "An update takes the learning rate that the group has when it runs, not when step() was called.",
    ),
    Planted(
        "learning_rate_of_the_stack",
        MUON,
        "scalars(weights.size(-2), weights.size(-1), piece.transposed);",
        "scalars(weights.numel() / weights.size(-1), weights.size(-1), piece.transposed);",
        "Matrices that are updated together have the learning rate of one as tall as all of them.",
    ),
    Planted(
        "batch_follows_its_first",
        MUON_STEP,
        "while (end < size && group(end) == group(begin)) ++end;",
        "while (end < size) ++end;",
        "Of a batch in which some matrices have no gradient, all are updated or none.",
    ),
    Planted(
        "decay_by_adjusted_lr",
        MUON,
        "1 - options_.lr * options_.weight_decay",
        "1 - adjust_lr(options_.adjust_lr, options_.lr, rows, cols) * options_.weight_decay",
        "Weights of matrices with more rows than columns decay too fast.",
    ),
)
