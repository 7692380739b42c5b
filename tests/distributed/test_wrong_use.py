"""Whatever is used wrongly raises ValueError on every rank, says what to do, and leaves the processes usable."""

from __future__ import annotations

import pytest
import wrong_use_cases as cases

MESH = (2, 2)
# (case, options, words of the message)
WRONG = [
    ("dedicate_on_this_mesh", {"strategy": "fastest"}, ["strategy", "load_balance", "fastest"]),
    ("dedicate_on_this_mesh", {"reshard_after_forward": 2}, ["reshard_after_forward", "True, False or None"]),
    ("dedicate_on_this_mesh", {"node_copy": 1}, ["node_copy", "True or False"]),
    ("dedicate_on_this_mesh", {"lookahead": -1}, ["lookahead", "0 or more", "-1"]),
    ("dedicate_on_this_mesh", {"lookahead": 1.5}, ["lookahead", "number of units", "1.5"]),
    ("dedicate_on_this_mesh", {"lookahead": True}, ["lookahead", "True"]),
    ("dedicate_on_this_mesh", {"lookahead": 2**40}, ["lookahead", "number of units"]),
    ("dedicate_on_this_mesh", {"max_units_in_flight": 1}, ["max_units_in_flight", "2 or more or None"]),
    ("no_sync_without_muon", {}, ["no_sync", "dmuon.Muon"]),
    ("dedicate_on_this_mesh", {"timeout": 5}, ["timeout", "timedelta"]),
    ("dedicate_on_this_mesh", {"mp_policy": "bf16"}, ["mp_policy", "MixedPrecisionPolicy"]),
    ("after_fully_shard", {}, ["already under fully_shard", "dedicate_params first"]),
    ("twice", {}, ["one call a model"]),
    ("twice_after_muon", {}, ["dedicate_params", "model"]),
    ("inside_a_dedicated_model", {}, ["dedicated already", "one call a model"]),
    ("forward_between", {"fsdp": False}, ["between dedicate_params and Muon"]),
    ("forward_between", {"fsdp": True}, ["between dedicate_params and Muon"]),
    ("forward_of_a_submodule_between", {}, ["between dedicate_params and Muon"]),
    ("select_a_vector", {}, ["select", "1-D", "norm"]),
    ("select_returns_a_string", {}, ["select", "True, False or None", "'muon'"]),
    ("select_fails_on_one_rank", {}, ["select", "True, False or None"]),
    ("select_raises", {}, ["dedicate_params: select", "KeyError", "embedding.weight"]),
    ("module_replaced_between", {}, ["'blocks.0.up.weight' or its module was replaced"]),
    ("weight_assigned_between", {}, ["'blocks.0.up.weight' or its module was replaced"]),
    ("matrix_added_between", {}, ["'blocks.0.up.adapter.weight' was added after dedicate_params"]),
    ("hook_before", {}, ["'blocks.0.up.weight' has gradient hooks", "select()"]),
    ("hook_after", {"kind": "register_hook"}, ["register_hook on 'blocks.0.up.weight'"]),
    ("hook_after", {"kind": "register_post_accumulate_grad_hook"}, ["grad_hook on 'blocks.0.up.weight'"]),
    ("clip_by_two_numbers_on_one_rank", {}, ["max_norm"]),
    ("muon_without_dedicate", {}, ["Muon", "dedicate_params"]),
    ("muon_twice", {}, ["one Muon a model"]),
    ("models_differ", {}, ["ranks differ", "same model"]),
    ("dtypes_differ", {}, ["ranks differ", "bfloat16"]),
    ("options_differ", {}, ["ranks differ", "rank0", "round_robin"]),
    ("muon_options_differ", {}, ["ranks differ", "lr"]),
    ("muon_option_wrong_on_one_rank", {}, ["momentum", "[0, 1)"]),
    ("meta_model", {}, ["meta", "materialise"]),
    ("cast_between", {"fsdp": False}, ["cast the model before dedicate_params"]),
    ("cast_between", {"fsdp": True}, ["cast the model before dedicate_params"]),
    ("load_between", {"strict": True}, ["load weights before dedicate_params"]),
    ("load_between", {"strict": False}, ["load weights before dedicate_params"]),
    ("save_between", {}, ["full_params"]),
    ("other_mesh", {}, ["same mesh"]),
    ("cast_without_fsdp", {}, ["mp_policy.param_dtype", "without fully_shard"]),
    ("skips_in_the_first_step", {"skip": 0}, ["ranks disagree", "first step"]),
    ("skips_in_the_first_step", {"skip": 3}, ["ranks disagree", "first step"]),
    ("backward_differs_in_the_first_step", {}, ["ranks disagree", "first step"]),
    ("grad_scaler", {"fsdp": False}, ["GradScaler", "bfloat16"]),
    ("grad_scaler", {"fsdp": True}, ["GradScaler", "bfloat16"]),
    ("torch_clip", {"fsdp": False, "foreach": None}, ["dmuon.clip_grad_norm_"]),
    ("torch_clip", {"fsdp": True, "foreach": None}, ["dmuon.clip_grad_norm_"]),
    ("torch_clip", {"fsdp": False, "foreach": True}, ["dmuon.clip_grad_norm_"]),
    ("torch_clip_value", {}, ["dmuon.clip_grad_norm_"]),
    ("deepcopy", {}, ["deepcopy", "full_params"]),
    ("pickled", {}, ["pickling", "full_params"]),
    ("state_dict", {"of": "model"}, ["state_dict", "full_params"]),
    ("state_dict", {"of": "block"}, ["state_dict", "full_params"]),
    ("state_dict", {"of": "opt"}, ["state_dict", "full_params"]),
    ("load_state_dict", {}, ["load_state_dict", "full_params"]),
    ("load_state_dict", {"strict": False}, ["load_state_dict", "full_params"]),
    ("load_optimizer", {}, ["load_state_dict", "full_params"]),
    ("initialise_after", {}, ["blocks.0.up.weight", "full_params"]),
    ("average_weights", {}, ["full_params"]),
    ("read_a_weight", {}, ["blocks.0.up.weight", "full_params"]),
    ("forward_in_full_params", {}, ["full_params", "leave the context"]),
    ("nested_full_params", {}, ["full_params", "one context"]),
    ("clip_bad_norm", {}, ["max_norm", "positive"]),
    ("lr_differs_at_a_step", {}, ["hyperparameters", "same on every rank"]),
    ("lr_wrong_on_one_rank", {}, ["every rank", "lr"]),
    ("max_norm_wrong_on_one_rank", {}, ["every rank", "max_norm"]),
    ("lr_differs_after_clipping", {}, ["hyperparameters", "same on every rank"]),
    ("step_after_no_sync", {}, ["no_sync", "outside"]),
    ("max_norm_differs", {}, ["max_norm", "same on every rank"]),
    ("muon_group_of_strangers", {}, ["add_param_group", "select"]),
]


@pytest.mark.parametrize(("name", "options", "words"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_raises_on_every_rank_and_says_what_to_do(ranks, name, options, words):
    messages = ranks.run(cases.attempt, MESH, name=name, options=options)
    for message in messages:
        for word in words:
            assert word in message


def test_a_mesh_of_three_dimensions(ranks):
    for message in ranks.run(cases.attempt, (2, 2, 1), name="dedicate_on_this_mesh", options={}):
        assert "1 dimension (shard) or 2 (replicate, shard)" in message
