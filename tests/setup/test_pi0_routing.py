"""Who updates pi0's and pi0.5's matrices: openpi's module tree, with its names and a layer each."""

from __future__ import annotations

import re

import pytest
import torch.nn as nn
from dmuon._setup.routing import route

OF_TIME = ["state_proj action_time_mlp_in action_time_mlp_out", "time_mlp_in time_mlp_out"]


def tree(cls: type[nn.Module] = nn.Module, **children: nn.Module) -> nn.Module:
    module = cls()
    for name, child in children.items():
        setattr(module, name, child)
    return module


class ForCausalLM(nn.Module):
    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def linears(names: str, bias: bool = False) -> dict[str, nn.Module]:
    return {name: nn.Linear(8, 8, bias) for name in names.split()}


def gemma(adaptive: bool) -> nn.Module:
    def norm() -> nn.Module:
        return tree(dense=nn.Linear(8, 24)) if adaptive else nn.RMSNorm(8)

    layer = tree(self_attn=tree(**linears("q_proj k_proj v_proj o_proj")), input_layernorm=norm())
    layer.mlp, layer.post_attention_layernorm = tree(**linears("gate_proj up_proj down_proj")), norm()
    return tree(layers=nn.ModuleList([layer]), norm=norm())


def pi(half: bool) -> nn.Module:
    """pi0, or pi0.5."""
    layer = tree(self_attn=tree(**linears("k_proj v_proj q_proj out_proj", True)), mlp=tree(**linears("fc1 fc2", True)))
    embeddings = tree(patch_embedding=nn.Conv2d(3, 8, 2), position_embedding=nn.Embedding(4, 8))
    vision = tree(embeddings=embeddings, encoder=tree(layers=nn.ModuleList([layer])))
    language, head = gemma(False), nn.Linear(8, 32, bias=False)
    language.embed_tokens = nn.Embedding(32, 8)
    language.embed_tokens.weight = head.weight
    model = tree(vision_tower=tree(vision_model=vision), multi_modal_projector=tree(linear=nn.Linear(8, 8)))
    model.language_model = language
    paligemma = tree(ForCausalLM, model=model, lm_head=head)
    expert = tree(ForCausalLM, model=gemma(half), lm_head=nn.Linear(8, 32, bias=False))
    both = tree(paligemma=paligemma, gemma_expert=expert)
    return tree(paligemma_with_expert=both, **linears(f"action_in_proj action_out_proj {OF_TIME[half]}", True))


@pytest.mark.parametrize("half", [False, True])
def test_hidden_matrices_are_muons_and_embeddings_and_heads_are_adamws(half):
    rows = [row for row in route(pi(half), None)[1] if len(row.shape) > 1]
    adamw = {re.sub(".*(paligemma|expert)[.](model[.])?", "", row.name): row.why for row in rows if not row.views}
    assert adamw == {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": "no rule for Conv2d (4-D)",
        "vision_tower.vision_model.embeddings.position_embedding.weight": "embedding",
        "language_model.embed_tokens.weight": "tied to an embedding",
        "lm_head.weight": "output head, by get_output_embeddings()",
        "action_out_proj.weight": "output head, by its name 'action_out_proj'",
    }
    muon = {row.name.split(".")[-2] for row in rows if row.views}
    hidden = "q_proj k_proj v_proj o_proj out_proj gate_proj up_proj down_proj fc1 fc2 linear action_in_proj"
    assert muon == {*hidden.split(), *OF_TIME[half].split()} | ({"dense"} if half else set())
    assert sum(bool(row.views) for row in rows) == 6 + 1 + 2 * 7 + (6 if half else 4)
