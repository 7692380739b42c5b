"""Models of Transformers, timm and diffusers train under FSDP2 as on one process: mixtures, `Conv1D`, images, sound."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from real_training import MATRICES, loss_of, made, reference, start, told_of_an_adapter, train
from refusals import messages_of
from training import place_of

pytestmark = pytest.mark.cpu("the asynchronous device lacks operators that these models use")


def assert_as_on_one_process(name: str, results: list[Any]) -> None:
    initial, expected = reference(name)
    for got in results:
        assert got.keys() == expected.keys()
        for parameter, weight in expected.items():
            moved = float((weight - initial[parameter]).norm())
            error = float((got[parameter] - weight).norm())
            assert error <= 1e-3 * moved + 1e-6, f"{parameter}: |W - W_ref| = {error:.2e}, |W_ref - W_0| = {moved:.2e}"


# In turn on one node and on two: of each family some on both.
@pytest.mark.parametrize(("name", "mesh"), list(zip(MATRICES, itertools.cycle([(1, 4), (2, 2)]), strict=False)))
def test_a_real_model_is_trained_as_on_one_process(ranks, name, mesh):
    assert_as_on_one_process(name, ranks.run(train, mesh, name=name))


def called_outside_of_its_block(mesh: Any) -> None:
    model = made("dit")
    start(mesh, model)
    loss_of("dit", model, 0, *place_of(mesh)).backward()


def test_a_part_that_is_called_outside_of_its_block_is_refused_with_the_way_out(ranks):
    for message in messages_of(ranks, called_outside_of_its_block):
        assert "'transformer_blocks.0.norm1.emb.timestep_embedder.linear_1.weight' is used" in message
        assert "outside of the forward of the module that fully_shard was given" in message
        assert "linear_1.bias' beside it is not gathered" in message and "fully_shard on the module" in message


@pytest.mark.parametrize("name", ["gpt2", "timm vit"])
def test_sums_of_losses_and_the_first_rank_s_weights(ranks, name):
    """Where FSDP2 is told not to divide, and rank 0 alone has loaded a checkpoint."""
    assert_as_on_one_process(name, ranks.run(train, (2, 2), name=name, sums=True, loaded_on_rank_0=True))


def test_an_adapter_that_comes_after_muon_is_told_of_once(ranks):
    ((message,),) = [told for told in ranks.run(told_of_an_adapter, (2, 2), name="gpt2", target="c_fc") if told]
    assert "c_fc.lora_A.default.weight'" in message and "change the model before dedicate_params" in message
