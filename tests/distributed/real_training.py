"""How the models of real_models.py that train do so, on ranks and on one process."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from cut import Cut
from logged import logged
from models import weights_of_plain
from real_models import BUILD
from torch.distributed.fsdp import FSDPModule, fully_shard
from training import AHEAD, LR, WEIGHT_DECAY, dedicate, place_of, weights_of

import dmuon

STEPS, BATCH, LENGTH, VOCABULARY = 2, 8, 16, 128
ADAMW_EPS = 1e-3  # the biases of keys have gradients of nothing but rounding
NO_IMAGE = 4  # smaller tokens have a meaning

# What the whole model calls too; inside of its block alone it would be without values then.
APART = {"dit": ("transformer_blocks.0.norm1.emb",)}

# The matrices, as regular expressions of names; of a stack of experts one for each.
LAYERS = r"layers\.\d+\..*(proj|proj_with_mqa|fc\d|gate)\.weight"
MATRICES = {
    "tied llama": LAYERS,
    "qwen3 moe": LAYERS,
    "mixtral": LAYERS,
    "deepseek v3": LAYERS,
    "t5": r"(Attention\.[qkvo]|DenseReluDense\.w[io])\.weight",
    "gpt2": r"\.h\.\d+\..*c_\w+\.weight",
    "vit": LAYERS,
    "whisper": LAYERS,
    "timm vit": r"blocks\.\d+\.(attn|mlp)\.\w+\.weight",
    "sd3": r"transformer_blocks\.\d+\..*weight|(context|timestep|text)_embedder.*weight|norm_out\.linear\.weight",
    "dit": r"transformer_blocks\.\d+\..*(linear|linear_\d|to_\w|to_out\.0|proj|net\.2)\.weight|proj_out_1\.weight",
    "qwen2.5 vl": rf"{LAYERS}|visual\.blocks\.\d+\..*(proj|qkv)\.weight|merger\.mlp\.\d\.weight",
}


def made(name: str) -> nn.Module:
    """With weights large enough that every gradient is far from rounding."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()  # without dropout
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if isinstance(model, transformers.PreTrainedModel):
        model.tie_weights()
    return model


def matrices_of(model: str) -> Callable[[str], Callable[[torch.Tensor], list[torch.Tensor]] | None]:
    def of(name: str) -> Callable[[torch.Tensor], list[torch.Tensor]] | None:
        if re.search(r"\.experts\.\w+$", name):
            return lambda p: list(p.unbind())
        if model == "gpt2" and re.search(MATRICES[model], name):  # stored as [in, out], Q, K and V side by side
            return lambda p: [block.T for block in p.chunk(3 if "c_attn" in name else 1, dim=1)]
        return (lambda p: [p]) if re.search(MATRICES[model], name) else None

    return of


def loss_of(name: str, model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Of this rank's part of the batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(NO_IMAGE, VOCABULARY, (BATCH, LENGTH + 1), generator=generator).chunk(size)[rank]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(BATCH, *sizes, generator=generator).chunk(size)[rank]

    if name == "vit":
        return F.cross_entropy(model(drawn(3, 32, 32)).logits, targets[:, 0] % 10)
    if name == "timm vit":
        return F.cross_entropy(model(drawn(3, 224, 224)), targets[:, 0] % 10)
    if name in ("sd3", "dit"):  # they take noise out of latents
        told = {"timestep": targets[:, 0]}
        if name == "sd3":
            told |= {"encoder_hidden_states": drawn(5, 32), "pooled_projections": drawn(32)}
        else:
            told |= {"class_labels": targets[:, 1] % 10}
        return F.mse_loss(model(drawn(4, 8, 8), **told).sample, drawn(4, 8, 8))
    if name == "t5":
        logits = model(input_ids=inputs.flip(1), decoder_input_ids=inputs).logits
    elif name == "whisper":
        logits = model(input_features=drawn(16, 64), decoder_input_ids=inputs).logits
    elif name == "qwen2.5 vl":
        image = torch.tensor([2, 3, 3, 3, 3]).expand(len(inputs), -1)  # where it begins, and what 4 x 4 patches become
        grid = torch.tensor([[1, 4, 4]]).expand(len(inputs), -1)
        pixels = drawn(16, 3 * 2 * 14 * 14).flatten(0, 1)
        seen = torch.cat([image, inputs], dim=1)
        kinds = (seen == 3).int()
        logits = model(input_ids=seen, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds).logits
        logits = logits[:, image.shape[1] :]
    else:
        logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@functools.cache
def reference(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights before the first step and after the last, on one process."""
    model = made(name)
    initial, optimizer = weights_of_plain(model), Cut(model, matrices_of(name), ADAMW_EPS)
    for step in range(STEPS):
        loss_of(name, model, step, 0, 1).backward()
        optimizer.step()
    return initial, weights_of_plain(model)


def select(name: str, module: nn.Module, parameter: nn.Parameter) -> dmuon.View | None:
    return dmuon.views.transposed(dmuon.views.columns(parameter, 3)) if name.endswith("c_attn.weight") else None


def start(
    mesh: Any, model: nn.Module, fsdp_sums: bool = False, apart: tuple[str, ...] = (), **options: Any
) -> dmuon.Muon:
    """`apart`: modules that become units of their own."""
    dedicate(model, mesh, AHEAD, select=select, **options)
    for path in apart:
        fully_shard(model.get_submodule(path), mesh=mesh)
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for path, layers in lists.items():
        inside_another = any(path.startswith(f"{other}.") for other in lists)
        for layer in () if inside_another else layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules() if fsdp_sums else ():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return dmuon.Muon(
        model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32, adamw_lr=3e-4, adamw_eps=ADAMW_EPS
    )


def train(mesh: Any, name: str, sums: bool = False, loaded_on_rank_0: bool = False) -> dict[str, torch.Tensor]:
    """The weights after the last step.

    Args:
        mesh: of the ranks.
        name: of the model.
        sums: gradients are summed over ranks, of losses that are divided already.
        loaded_on_rank_0: the other ranks have other matrices, and take those of rank 0.
    """
    rank, size = place_of(mesh)
    model = made(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters() if loaded_on_rank_0 and rank > 0 else ():
            if matrices_of(name)(path):  # of others fully_shard takes each rank's slice as it is
                parameter.add_(rank)
    options: dict[str, Any] = {"sync_from_rank0": True} if loaded_on_rank_0 else {}
    options |= {"gradient_divide_factor": 1.0, "fsdp_sums": True} if sums else {}
    optimizer = start(mesh, model, apart=APART.get(name, ()), **options)
    for step in range(STEPS):
        (loss_of(name, model, step, rank, size) / (size if sums else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dmuon.verify(model, optimizer)
    return weights_of(model)


def told_of_an_adapter(mesh: Any, name: str, target: str) -> list[str]:
    """What dmuon says of one that PEFT puts in after Muon was made."""
    model = made(name)
    optimizer = start(mesh, model)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[target], r=2), model)
    with logged() as messages:
        loss_of(name, model, 0, *place_of(mesh)).backward()
        optimizer.step()
    return [message for message in messages if "no group of the optimizer has" in message]
