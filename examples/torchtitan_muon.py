"""Trains torchtitan's models by torchtitan's own trainer, with dmuon as its optimizer (torchtitan 0.3).

    export PYTHONPATH=examples
    torchrun --nproc-per-node 4 -m torchtitan.train --module torchtitan_muon --config llama3_debugmodel

A module of configs, like torchtitan's `config_registry`. `with_muon` changes two parts of a config: the function that
parallelises the model, and the container of optimizers. The rates are arguments of the program: --optimizer.lr 0.01.
Everything else is the trainer's: the start on the meta device, clipping, schedules, checkpoints.
"""

import dataclasses
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

import dmuon

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keys that differ between pipeline stages


class MuonContainer(OptimizersContainer):
    """A dmuon.Muon for each part of the model."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        lr: float = 2e-2
        adamw_lr: float = 8e-4
        weight_decay: float = 0.1

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        options = {"lr": config.lr, "adamw_lr": config.adamw_lr, "weight_decay": config.weight_decay}
        self.optimizers = [dmuon.Muon(part, **options) for part in model_parts]
        self._post_init([parameter for part in model_parts for parameter in part.parameters()])

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            state |= get_optimizer_state_dict(part, optimizer, options=FLAT)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=FLAT)


def with_muon(config: Trainer.Config) -> Trainer.Config:
    spec = config.model_spec

    def parallelize(model: nn.Module, **options: Any) -> nn.Module:
        model = spec.parallelize_fn(model, **options)  # calls fully_shard, which is to sum gradients
        # The fused weight has the rows of a head of Q, K or V together, in the order of the heads of K and V.
        head_dims = {m.wqkv: m.head_dim for m in model.modules() if isinstance(m, FusedQKVLinear)}

        def select(name: str, module: nn.Module, parameter: nn.Parameter) -> dmuon.View | None:
            is_fused = module in head_dims and parameter.ndim == 2
            return dmuon.views.per_head(parameter, head_dims[module]) if is_fused else None

        dmuon.dedicate_params(model, gradient_divide_factor=1.0, select=select)
        return model

    config.model_spec = dataclasses.replace(spec, parallelize_fn=parallelize)
    config.optimizer = MuonContainer.Config()
    config.parallelism.spmd_backend = "partial_dtensor"  # parameters are plain tensors until fully_shard
    config.training.disable_cuda_graphs = True
    return config


def llama3_debugmodel() -> Trainer.Config:
    return with_muon(llama3.llama3_debugmodel())


def llama3_8b() -> Trainer.Config:
    return with_muon(llama3.llama3_8b())
