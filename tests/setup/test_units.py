"""Which module's hooks move a leaf."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn as nn
from dmuon._setup.units import Unit, chosen_units, find_units
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule


def as_fsdp(*modules: nn.Module) -> nn.Module:
    """As fully_shard changes modules of one group; it needs ranks, and units look at nothing else."""
    state = types.SimpleNamespace(_modules=modules)
    for module in modules:
        added = {"_get_fsdp_state": lambda self: state}
        module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), added)
    return modules[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def units_of(root: nn.Module, *paths: str | list[str]) -> dict[str, tuple[int, ...]]:
    """The leaves of each unit; `paths`: of the modules that hold each leaf."""
    found = find_units(root, [[path] if isinstance(path, str) else path for path in paths])
    assert all(unit.modules == (root.get_submodule(unit.name),) for unit in found)
    return {unit.name: unit.leaves for unit in found}


def test_the_innermost_sharded_module_is_a_unit():
    root = tree(blocks=nn.ModuleList(as_fsdp(tree(mlp=as_fsdp(Mlp()), proj=nn.Linear(2, 2))) for _ in range(2)))
    paths = ["blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.0.proj", "blocks.1.proj"]
    assert units_of(root, *paths) == {"blocks.0": (2,), "blocks.0.mlp": (0, 1), "blocks.1": (3,)}


def test_the_sharded_root_is_not():
    root = as_fsdp(tree(mlp=Mlp(), layers=nn.Sequential(Mlp())))
    assert units_of(root, "mlp.up", "mlp.down", "layers.0.up") == {"mlp.up": (0,), "mlp.down": (1,), "layers.0": (2,)}


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_else_the_outermost_item_of_a_list_is(container):
    def listed(*items: nn.Module) -> nn.Module:
        return container(items) if container is nn.ModuleList else container(*items)

    root = tree(stages=listed(*(tree(blocks=listed(Mlp(), Mlp())) for _ in range(2))))
    paths = ["stages.0.blocks.0.up", "stages.0.blocks.1.down", "stages.1.blocks.1.up"]
    assert units_of(root, *paths) == {"stages.0": (0, 1), "stages.1": (2,)}


def test_a_model_that_is_a_list_has_its_items_as_units():
    assert units_of(nn.Sequential(Mlp(), Mlp()), "0.up", "0.down", "1.up") == {"0": (0, 1), "1": (2,)}


def test_else_the_module_itself_is():
    root = tree(body=Mlp())
    root.weight = nn.Parameter(torch.zeros(2, 2))
    assert units_of(root, "body.up", "", "body.down") == {"": (1,), "body.up": (0,), "body.down": (2,)}


def test_units_and_their_leaves_are_in_module_order():
    root = tree(first=nn.Linear(2, 2), blocks=nn.ModuleList([Mlp(), Mlp()]), last=nn.Linear(2, 2))
    found = units_of(root, "last", "blocks.1.up", "blocks.0.up", "first", "blocks.1.down")
    assert list(found.items()) == [("first", (3,)), ("blocks.0", (2,)), ("blocks.1", (1, 4)), ("last", (0,))]


def test_a_module_that_two_units_share_belongs_to_their_lowest_common_ancestor():
    root = tree(layers=nn.ModuleList([Mlp(), Mlp(), Mlp()]))
    root.layers[2].up = root.layers[0].up
    assert units_of(root, "layers.0.up", "layers.0.down") == {"": (0,), "layers.0": (1,)}


def test_a_unit_that_stands_in_several_places_is_one():
    block = Mlp()
    root = tree(layers=nn.ModuleList([block, Mlp(), block]))
    assert units_of(root, "layers.0.up", "layers.1.up") == {"layers.0": (0,), "layers.1": (1,)}


def test_a_leaf_tied_inside_a_unit_belongs_to_it():
    root = nn.Sequential(Mlp(), Mlp())
    assert units_of(root, ["1.up", "1.down"]) == {"1": (0,)}


def test_a_leaf_tied_across_units_belongs_to_their_lowest_common_ancestor():
    root = tree(body=tree(left=as_fsdp(Mlp()), right=as_fsdp(Mlp())), head=nn.Linear(2, 2))
    assert units_of(root, ["body.left.up", "body.right.up"]) == {"body": (0,)}
    assert units_of(root, ["body.left.up", "head"]) == {"": (0,)}
    assert units_of(root, ["body.left.up", ""]) == {"": (0,)}


def test_names_that_begin_alike_are_no_common_ancestor():
    root = tree(block=Mlp(), block2=Mlp())
    assert units_of(root, ["block.up", "block2.up"]) == {"": (0,)}


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.ModuleDict({"0": blocks[0], "1": blocks[1]})])
def test_an_ancestor_that_is_never_called_gives_way_to_one_that_is(container):
    root = tree(body=tree(blocks=container([as_fsdp(Mlp()), as_fsdp(Mlp())])))
    assert units_of(root, ["body.blocks.0.up", "body.blocks.1.up"]) == {"body": (0,)}


def test_a_parameter_of_a_list_belongs_to_the_module_around_it():
    root = tree(body=tree(weights=nn.ParameterList([torch.zeros(2, 2)])))
    assert units_of(root, "body.weights") == {"body": (0,)}


def test_an_attentions_projection_which_is_never_called_belongs_to_the_attention():
    root = tree(attention=nn.MultiheadAttention(4, 2))
    assert units_of(root, "attention", "attention.out_proj") == {"attention": (0, 1)}


def test_a_wrapper_leaves_no_trace_in_a_units_name():
    root = tree(body=checkpoint_wrapper(nn.Linear(2, 2)), blocks=nn.Sequential(checkpoint_wrapper(Mlp())))
    found = find_units(root, [["body._checkpoint_wrapped_module"], ["blocks.0._checkpoint_wrapped_module.up"]])
    assert [unit.name for unit in found] == ["body", "blocks.0"]
    assert [unit.modules for unit in found] == [(root.body._checkpoint_wrapped_module,), (root.blocks[0],)]


def test_a_model_without_leaves_has_no_units():
    assert find_units(Mlp(), []) == []


def test_a_unit_says_which_module_it_is():
    root = nn.Sequential(Mlp())
    assert find_units(root, [["0.up"]]) == [Unit("0", (root[0],), (0,))]


def test_a_group_of_fully_shard_is_one_unit():
    root = tree(vlm=nn.ModuleList([Mlp(), Mlp()]), expert=nn.ModuleList([Mlp(), Mlp()]))
    for a, b in zip(root.vlm, root.expert, strict=True):
        as_fsdp(a, b)
    found = find_units(root, [["vlm.0.up"], ["vlm.1.up"], ["expert.0.up"], ["expert.1.up", "vlm.1.down"]])
    assert [(unit.name, unit.leaves) for unit in found] == [("vlm.0", (0, 2)), ("vlm.1", (1, 3))]
    assert [unit.modules for unit in found] == [(root.vlm[0], root.expert[0]), (root.vlm[1], root.expert[1])]


def test_a_list_with_a_forward_may_be_a_unit():
    class Called(nn.ModuleList):
        def forward(self) -> None:
            pass

    root = tree(called=as_fsdp(Called([nn.Identity()])))
    root.called.weight = nn.Parameter(torch.zeros(2, 2))
    assert units_of(root, "called") == {"called": (0,)}


def chosen_of(root: nn.Module, units: object, *paths: str) -> dict[str, tuple[int, ...]]:
    found = find_units(root, [[path] for path in paths], chosen_units(root, units))
    return {unit.name: unit.leaves for unit in found}


def test_the_user_says_otherwise():
    root = tree(blocks=nn.ModuleList([as_fsdp(Mlp()), as_fsdp(Mlp())]), head=nn.Linear(2, 2))
    paths = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "head"]
    by_name = {"blocks.0.up": (0,), "blocks.0": (1,), "blocks.1": (2,), "head": (3,)}
    assert chosen_of(root, lambda name, module: name == "blocks.0.up", *paths) == by_name
    assert chosen_of(root, [root.blocks[0].up], *paths) == by_name
    assert chosen_of(root, lambda name, module: isinstance(module, nn.ModuleList), *paths)["blocks"] == (0, 1, 2)
    assert chosen_of(root, lambda name, module: name == "", *paths) == {"": (0, 1, 2, 3)}
    together = [[root.blocks[0].down, root.head]]
    assert chosen_of(root, together, *paths) == {"blocks.0": (0,), "blocks.0.down": (1, 3), "blocks.1": (2,)}


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (7, r"units: expected a function of \(name, module\), or a list"),
        ("blocks", "units: expected a function"),
        ([7], "units: expected a function"),
        ([["blocks"]], "expected modules of the model, got 'blocks'"),
        ([nn.Linear(2, 2)], "expected modules of the model, got Linear"),
    ],
)
def test_bad_units_are_refused(units, words):
    with pytest.raises(ValueError, match=words):
        chosen_units(tree(body=Mlp()), units)


def test_a_function_of_units_answers_true_or_false():
    with pytest.raises(ValueError, match=r"^dedicate_params: units: expected True or False for '', got 'x'$"):
        chosen_units(tree(body=Mlp()), lambda name, module: "x")
    with pytest.raises(ValueError, match=r"^dedicate_params: units: raised ZeroDivisionError for 'body': division"):
        chosen_units(tree(body=Mlp()), lambda name, module: bool(name and 1 / 0))


def test_a_module_in_two_units_is_refused():
    root = tree(body=Mlp())
    with pytest.raises(ValueError, match=r"expected 'body\.up' in one unit, got it in two"):
        chosen_units(root, [root.body.up, [root.body.down, root.body.up]])


def test_a_module_of_another_dtype_is_a_unit():
    half, full = torch.bfloat16, torch.float32
    root = tree(layers=nn.ModuleList([tree(mlp=Mlp(), norm=tree(dense=nn.Linear(2, 2)))]), both=as_fsdp(Mlp()))
    paths = [["layers.0.mlp.up"], ["layers.0.mlp.down"], ["layers.0.norm.dense"], ["both.up"], ["both.down"]]
    found = {unit.name: unit.leaves for unit in find_units(root, paths, (), [half, half, full, full, full])}
    assert found == {"layers.0": (0, 1), "layers.0.norm.dense": (2,), "both": (3, 4)}
    chosen = [(root.layers[0].mlp.up, root.both.down)]  # modules of one unit cannot part
    found = {unit.name: unit.leaves for unit in find_units(root, paths, chosen, [half, half, half, half, full])}
    assert found == {"layers.0": (1, 2), "layers.0.mlp.up": (0, 4), "both": (3,)}
