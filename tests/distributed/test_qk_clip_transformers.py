"""QK-clip on real attention: the same step again gives a clipped head the logit tau, and other heads their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers as hf
from real_models import GROUPED, deepseek_v3
from refusals import messages_of
from torch.distributed.fsdp import fully_shard
from training import AHEAD, dedicate, place_of

import dmuon

BUILD = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=16)),
    "deepseek v3": deepseek_v3,
}


def built(name: str, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    model = BUILD[name]()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "self_attn" in path and "o_proj" not in path:
                parameter.normal_(std=0.3)  # biases, too
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = max(module.num_key_value_groups, 1)  # small MLA has fewer heads than it says
    return model.train()


def started(mesh: Any, name: str, implementation: str, tau: float) -> tuple[nn.Module, dmuon.Muon, dmuon.QKClip]:
    model = built(name, implementation)
    dedicate(model, mesh, AHEAD)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = dmuon.Muon(model, lr=0.0, weight_decay=0.0, adamw_lr=0.0)
    return model, opt, dmuon.QKClip(model, tau=tau)


def step(mesh: Any, model: nn.Module, opt: dmuon.Muon) -> None:
    rank, size = place_of(mesh)
    tokens = torch.randint(0, 128, (4, 9), generator=torch.Generator().manual_seed(3)).chunk(size)[rank]
    mask = torch.ones_like(tokens)
    mask[:, :2] = 0  # padding on the left
    model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
    opt.step()
    opt.zero_grad()


def largest(mesh: Any, name: str, implementation: str, tau: float) -> list[dict[str, torch.Tensor]]:
    model, opt, clip = started(mesh, name, implementation, tau)
    history = []
    for _ in range(2):
        step(mesh, model, opt)
        history.append({path: logits.cpu() for path, logits in clip.max_logits.items()})
    return history


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "deepseek v3"])
def test_heads_above_tau_come_down_to_it_and_others_stay(ranks, name):
    first = ranks.run(largest, (2, 2), name=name, implementation="sdpa", tau=float("inf"))[0][0]
    path = "model.layers.0.self_attn"
    tau = float(first[path].sort().values[1:3].mean())  # two of four heads are above
    for implementation in ("sdpa", "eager"):
        for before, after in ranks.run(largest, (2, 2), name=name, implementation=implementation, tau=tau):
            torch.testing.assert_close(before, first, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(after[path], before[path].clamp(max=tau), rtol=1e-3, atol=1e-4)


def with_tau(mesh: Any, tau: float) -> None:
    started(mesh, "qwen3", "sdpa", tau)


def test_heads_with_norms_are_logged_and_not_clipped(ranks):
    (before, after), *_ = ranks.run(largest, (2, 2), name="qwen3", implementation="sdpa", tau=float("inf"))
    torch.testing.assert_close(after, before)
    assert all(logits.isfinite().all() for logits in before.values())
    for message in messages_of(ranks, with_tau, tau=1.0):
        assert "'model.layers.0.self_attn': expected queries and keys as the projections make them" in message
