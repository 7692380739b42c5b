"""Models of Transformers under their own plans of tensor parallelism train as on one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
from reference import ReferenceMuon
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from tp_models import meshes, whole, worst_error
from training import LR, WEIGHT_DECAY, dedicate

import dmuon

tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")  # since Transformers 5.21

VOCABULARY, STEPS = 48, 2
MOST_ERROR = 1e-4  # seen: 3e-5; one rounding of the first weights makes 2e-5 of these models
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE = {"Qwen3": {"head_dim": 8}, "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}


def make(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, **MORE.get(name, {})}
    config = getattr(transformers, f"{name}Config")(**sizes, tie_word_embeddings=False)
    return getattr(transformers, f"{name}ForCausalLM")(config).float()


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """By the model's own plan."""
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    plan = {}
    for pattern, style in model.tp_plan.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + r"(\.weight|\.bias)?")
        plan |= {name: style for name in names if matches.fullmatch(name)}
    tensor_parallel.apply_tensor_parallelism(model, mesh, plan)


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    tokens = torch.randint(1, VOCABULARY, (8, 24), generator=generator, device="cpu")
    tokens = tokens.to(next(model.parameters()).device)
    return model(input_ids=tokens, labels=tokens).loss


def train(mesh: DeviceMesh, name: str, folder: str | None = None) -> float:
    """Returns the largest error of a weight by the way it moved. `folder`: loads the model from there."""
    data, tensor = meshes((2, 2), mesh.device_type)
    if folder is None:
        model = make(name)
        parallelize(model, tensor)
        dedicate(model, data, {})
        for layer in model.model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    else:
        model = loaded(make(name), folder)
        dedicate(model, None, {})
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    matrices = [row.name for row in dmuon.routing_table(model) if row.algorithm == "muon"]
    for step in range(STEPS):
        loss_of(model, step, data.get_local_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = make(name)
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    cuts = {name: list for name in matrices if before[name].ndim == 3}  # experts
    reference = ReferenceMuon(alone, matrices, LR, WEIGHT_DECAY, cuts=cuts)
    for step in range(STEPS):
        for part in range(2):
            (loss_of(alone, step, part) / 2).backward()
        reference.step()
        reference.zero_grad()
    saved = {name: whole(value) for name, value in model.state_dict().items()}
    return worst_error(before, {name: p.detach() for name, p in alone.named_parameters()}, saved)


def loaded(model: Any, folder: str) -> Any:
    """Saves a model, and loads it as Transformers distributes it: by fully_shard too."""
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder)
    torch.distributed.barrier()
    config = transformers.distributed.DistributedConfig(tp_size=2, fsdp_size=2)
    return type(model).from_pretrained(folder, distributed_config=config, dtype=torch.float32)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral", "Phi3"])
def test_is_trained_as_on_one_process(ranks, name):
    for error in ranks.run(train, (4,), name=name):
        assert error <= MOST_ERROR


@pytest.mark.cpu("Transformers places each rank's weights on an accelerator of its own")
def test_a_model_that_transformers_has_distributed(ranks, tmp_path):
    for error in ranks.run(train, (4,), name="Llama", folder=str(tmp_path / "model")):
        assert error <= MOST_ERROR
