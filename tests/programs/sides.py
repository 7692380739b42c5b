"""Who plays a program: dmuon on ranks, one process without dmuon, or FSDP2 with AdamW on ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from after import After, AfterOnRanks, Values, whole
from dmuon._setup.place import clean_name
from model import INPUTS, Net, grouped, is_muons, make, selecting, several_of
from plans import every_matrix_of
from program import Options, Program
from reference import ReferenceMuon
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from training import LR, WEIGHT_DECAY, dedicate, place_of, weights_of

import dmuon
from dmuon import _plan

# Of the size of gradients here: a gradient that is nothing but noise then moves a weight by no more than noise.
ADAMW_EPS = 1e-2
ADAMW_LR = 1e-2
MAX_NORM = 0.1
GROUP = {"lr": LR / 4, "momentum": 0.8}  # of the matrices that are a group of their own


def batch_of(step: int, micro: int, rank: int, number: int) -> torch.Tensor:
    """[5, INPUTS] of one rank and one of the models."""
    seed = ((step * 16 + micro) * 16 + rank) * 4 + number
    return torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(seed))


class Side:
    """One process's part; `ranks` are those whose data it computes with."""

    ranks: Sequence[int]
    size: int
    dtype = torch.float32
    device = torch.device("cpu")
    models: list[Net]
    optimizers: list[Any]
    after: list[After]

    def scale(self) -> float:
        """What a rank's loss is multiplied by."""
        return 1.0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What a GradScaler makes of a loss."""
        return loss

    def unscale(self, optimizer: Any) -> None:
        """Ends the scaling, so that gradients can be clipped."""

    def step_scaled(self, optimizer: Any) -> None:
        optimizer.step()

    def reload(self) -> None:
        """Goes on with new models and optimizers, which have loaded the state of the old ones."""

    def no_sync(self, model: Net) -> AbstractContextManager[None]:
        return nullcontext()

    def set_flag(self, model: Net, flag: str, on: bool) -> None:
        """Sets a flag of FSDP2's."""

    def clip(self, model: Net, max_norm: float = MAX_NORM) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def weights(self, model: Net) -> Values:
        """Whole, of all parameters."""
        return {clean_name(name): p.detach().clone() for name, p in model.named_parameters()}


class Reference(Side):
    """One process that computes every rank's part; shares no code with dmuon."""

    def __init__(self, program: Program, dtype: torch.dtype, nudge: float = 0.0, muon: bool = True) -> None:
        """`nudge`: by how much each weight is changed at the start, relatively; `muon`: else AdamW has all."""
        in_bf16 = program.dtype == "bf16"  # then `dtype` is that of the weights
        self.ranks, self.size, self.dtype = range(program.size), program.size, torch.float32 if in_bf16 else dtype
        masters = [make(program, number).to(dtype) for number in range(2 if program.second else 1)]
        self.models, self.optimizers = [], []
        torch.manual_seed(99)
        for model in masters:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + nudge * torch.randn_like(parameter))
            names = [name for name, p in model.named_parameters() if muon and is_muons(name, p)]
            cuts = {name: several.cut for name in names if (several := several_of(program, name))}
            optimizer = ReferenceMuon(
                model,
                names,
                LR,
                WEIGHT_DECAY,
                adamw_lr=ADAMW_LR,
                cuts=cuts,
                rule=program.rule,
                cautious_weight_decay=program.cautious,
            )
            optimizer.own = {name: dict(GROUP) for name in grouped(model, program) if muon}
            if optimizer.adamw is not None:
                optimizer.adamw.param_groups[0]["eps"] = ADAMW_EPS
            self.optimizers.append(optimizer)
            self.models.append(computing_in_bf16(model, self.size) if in_bf16 else model)
        self._in_bf16, self._masters = in_bf16, dict(zip(self.models, masters, strict=True))
        self.after = [After(self, number) for number in range(len(masters))]

    def scale(self) -> float:
        return 1.0 if self._in_bf16 else 1.0 / self.size

    def clip(self, model: Net, max_norm: float = MAX_NORM) -> torch.Tensor:
        return super().clip(self.master(model), max_norm)

    def master(self, model: Net) -> Net:
        """Returns the model that keeps the weights in full precision."""
        return self._masters[model]

    def weights(self, model: Net) -> Values:
        return super().weights(self.master(model))


def computing_in_bf16(master: Net, size: int) -> Net:
    """A copy that begins each forward with the weights of `master` in bf16 and adds to its gradients a `size`th."""
    model = copy.deepcopy(master).bfloat16()
    pairs = list(zip(model.parameters(), master.parameters(), strict=True))

    def begin(_: nn.Module, arguments: Any) -> Any:
        for parameter, weight in pairs:
            parameter.data.copy_(weight.data)
        return (arguments[0].bfloat16(), *arguments[1:])

    def hand_on(parameter: torch.Tensor, weight: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.to(weight.dtype) / size, None
        weight.grad = gradient if weight.grad is None else weight.grad + gradient

    model.register_forward_pre_hook(begin)
    for parameter, weight in pairs:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(hand_on, weight=weight))
    return model


def shard(model: nn.Module, mesh: Any, wrap: str, **options: Any) -> None:
    if wrap == "none":
        return
    for block in model.blocks if wrap in ("blocks", "inner") else ():
        for module in block.modules() if wrap == "inner" else ():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def on_device(model: Net, device: torch.device) -> Net:
    """As `.to` does on GPUs; on the emulated device that would part what is tied."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules() if device.type != "cpu" else ():
        for name, parameter in module.named_parameters(recurse=False):
            there = moved.setdefault(parameter, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
            setattr(module, name, there)
    return model


class OnRanks(Side):
    def __init__(self, mesh: Any, program: Program) -> None:
        rank, self.size = place_of(mesh)
        self.ranks = [rank]
        if mesh.device_type != "cpu":
            self.device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
        self.mesh, self.program = mesh, program
        self.build(0)

    def build(self, first: int) -> None:
        """`first`: the number of the draw that the first model begins with."""
        self.models, self.optimizers = [], []
        for number in range(2 if self.program.second else 1):
            model = on_device(make(self.program, first + number), self.device)
            self.optimizers.append(self.start(model, self.mesh, self.program))
            self.models.append(model)

    def start(self, model: Net, mesh: Any, program: Program) -> Any:
        raise NotImplementedError

    def set_flag(self, model: Net, flag: str, on: bool) -> None:
        getattr(model, f"set_{flag}")(on)


@contextmanager
def divided(division: str) -> Iterator[None]:
    """Inside, plans are made of stacks that are divided so; as plans that come from files may be."""
    divide = _plan.divide

    def otherwise(items: list[_plan.Parameter], mesh: _plan.Mesh, smallest_part: int) -> list[_plan.Parameter]:
        return items if division == "none" else [one for item in items for one in every_matrix_of(item)]

    _plan.divide = divide if division == "by size" else otherwise  # type: ignore[assignment]
    try:
        yield
    finally:
        _plan.divide = divide


def named(members: dict[str, nn.Parameter], by: str) -> Any:
    """The members of a group, as Muon takes them."""
    if by == "function":
        clean = {name.replace("_checkpoint_wrapped_module.", "") for name in members}
        return lambda name, _module, _parameter: name in clean
    return list(members) if by == "names" else list(members.values())


class Dmuon(OnRanks):
    def __init__(self, mesh: Any, program: Program, options: Options, others: Options) -> None:
        """`others`: of the models that a reload goes on with; the next one goes back."""
        self.options, self.others = options, others
        self.scaler = torch.amp.GradScaler(mesh.device_type, init_scale=2.0**10)
        super().__init__(mesh, program)
        self.after = [AfterOnRanks(self, number) for number in range(len(self.models))]

    def start(self, model: Net, mesh: Any, program: Program) -> Any:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if program.dtype == "bf16" else None
        schedule = {name: value for name, value in vars(self.options).items() if name != "division"}
        same = {"mp_policy": policy} if policy else {}
        if program.sharded_first:
            shard(model, mesh, program.wrap, **same)
        members = grouped(model, program)  # after fully_shard, which replaces parameters; dedicate_params may be later
        dedicate(model, mesh, schedule, select=selecting(program), mp_policy=policy)
        if not program.sharded_first:
            shard(model, mesh, program.wrap, **same)
        rate: Any = torch.tensor if program.rates_as_tensors else float
        group = {**GROUP, "lr": rate(GROUP["lr"])}
        with divided(self.options.division):
            return dmuon.Muon(
                model,
                lr=rate(LR),
                weight_decay=WEIGHT_DECAY,
                ns_dtype=torch.float32,
                adamw_lr=ADAMW_LR,
                adamw_eps=ADAMW_EPS,
                rule=program.rule,
                cautious_weight_decay=program.cautious,
                muon_groups=[{"params": named(members, program.grouped_by), **group}] if members else [],
            )

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Any) -> None:
        self.scaler.unscale_(optimizer)

    def step_scaled(self, optimizer: Any) -> None:
        self.scaler.step(optimizer)
        if optimizer is self.optimizers[-1]:
            self.scaler.update()

    def reload(self) -> None:
        states = [(model.state_dict(), optimizer.state_dict()) for model, optimizer in self.both()]
        means = [after.held and after.held.state_dict() for after in self.after]
        self.options, self.others = self.others, self.options
        self.build(len(states))  # of other weights
        for (model, optimizer), (weights, state) in zip(self.both(), states, strict=True):
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        for after, mean in zip(self.after, means, strict=True):
            if mean is not None:
                after.new_mean()
                after.held.load_state_dict(mean)

    def both(self) -> Iterator[tuple[Net, Any]]:
        return zip(self.models, self.optimizers, strict=True)

    def no_sync(self, model: Net) -> AbstractContextManager[None]:
        return dmuon.no_sync(model)

    def clip(self, model: Net, max_norm: float = MAX_NORM) -> torch.Tensor:
        return dmuon.clip_grad_norm_(model, max_norm)

    def weights(self, model: Net) -> Values:
        return {clean_name(name): weight for name, weight in weights_of(model).items()}


class Stock(OnRanks):
    """What a program does without dmuon: FSDP2 and AdamW for all. Only where `fully_shard` manages parameters."""

    def start(self, model: Net, mesh: Any, program: Program) -> Any:
        shard(model, mesh, program.wrap)
        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            trainable, lr=ADAMW_LR, eps=ADAMW_EPS, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, foreach=False
        )

    @contextmanager
    def no_sync(self, model: Net) -> Iterator[None]:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_requires_all_reduce(False, recurse=False)
        yield
        for module in modules:
            module.set_requires_all_reduce(True, recurse=False)

    def weights(self, model: Net) -> Values:
        return {clean_name(name): whole(p) for name, p in model.named_parameters()}
