"""The agreement of all ranks before gradients are clipped or weights change."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from dmuon import _C
from dmuon._running import host_gradients
from dmuon._running.after_step import AfterStep
from dmuon._running.divide_factor import problem_of_factors
from dmuon._running.host_state import end_backward_of_fsdp2, problem_of_unreduced
from dmuon._running.owned_state import removed_states
from dmuon._setup.agreement import agreement, message_of
from dmuon._setup.hyperparameters import check_group, require_rule, settings_of
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.sharded import name_of

_LOST = (
    "dmuon: clip or step: a backward has raised, so gradients are lost. Expected: optimizer.zero_grad() after it, then "
    "all micro-steps of the step."
)
_TORN = (
    "dmuon: clip or step: the last step has failed or was interrupted, or a load of the optimizer was, so some "
    "parameters may have its update, or its state, and others not. Expected: load_state_dict of the model and of the "
    "optimizer, or a new process that loads a checkpoint."
)
_NO_MORE = (
    "dmuon: clip or step: a backward has raised, after which FSDP2 gives no gradients to the parameters of '{}' and "
    "others with this PyTorch. Expected: a new process that loads a checkpoint."
)


@dataclasses.dataclass(eq=False, repr=False)
class StepAgreement:
    """Gets a step's verdict by one message, which `clip_grad_norm_` or `step` sends, whichever comes first.

    Reads the optimizer's groups at every call, so that the user's changes count.
    """

    runtime: Any  # a Runtime, whose module imports this one
    optimizer: torch.optim.Optimizer  # its groups may come later
    rule: str  # of update, of all groups of matrices
    first_lrs: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)  # the constructor's, by algorithm
    # Groups have had these, and plain parameters beside them. They may have no weak references, see is_swapped.
    members: set[torch.Tensor] = dataclasses.field(default_factory=set, init=False)
    after_step: AfterStep | None = dataclasses.field(default=None, init=False)
    had_open_gradients: bool = dataclasses.field(default=False, init=False)  # on any rank before the last message
    changed: Counter[str] = dataclasses.field(default_factory=Counter, init=False)  # of gradients, since the message
    removed: dict[Any, frozenset[str]] = dataclasses.field(default_factory=dict, init=False)  # see removed_states
    _lost: str | None = dataclasses.field(default=None, init=False)  # if a backward has raised
    _applied: list[str] = dataclasses.field(default_factory=list, init=False)  # settings of the last step
    _owned_norms: tuple[torch.Tensor, ...] | None = dataclasses.field(default=None, init=False)  # of the verdict

    @property
    def _engine(self) -> _C.Engine:
        engine: _C.Engine = self.runtime.engine
        return engine

    def host_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that AdamW updates."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if not isinstance(p, OwnedTensor)]

    def host_misses_partial_sums(self) -> bool:
        """True if FSDP2 has sums of an HSDP mesh that only a synchronised backward sends on."""
        return self._engine.host_sums().held() and bool(self.runtime.fsdp_modules)

    def verdict(self, arguments: Sequence[str] = (), problem: str | None = None) -> _C.Verdict:
        """Returns the verdict over all gradients, owned and not. Collective, unless the step has its verdict already.

        Args:
            arguments: the arguments of clipping, which must be alike on all ranks.
            problem: an error in this rank's arguments.

        Raises:
            ValueError: on all ranks, if any rank has a problem or a bad hyperparameter, or if hyperparameters or
                `arguments` differ, in this call or in the last step. Names the problem, or the values of two ranks.
        """
        runtime, engine = self.runtime, self._engine
        self._owned_norms = None
        runtime.plain.made.clear()
        self.end_failed_backward(in_step=True)
        problem = problem or (_TORN if self.runtime.access.torn else self._lost) or self._problem()
        if self.host_misses_partial_sums():
            raise ValueError(
                "dmuon: clip or step after a backward under no_sync: FSDP2's gradients have not been summed over the "
                "replicates. Expected: the last backward before them outside of no_sync."
            )
        engine.settle_step()
        try:
            found = engine.verdict()
            if found is not None and runtime.plain.has_open():
                engine.forget_verdict()  # gradients were assigned since
                found = None
            if found is None:
                after = self.after_step
                problem = problem or problem_of_unreduced(runtime.model, runtime.fsdp_modules)
                problem = problem or (after.problem() if after else None)
                # Ranks compare a problem like a setting: if only some ranks have it, the others raise.
                changed = sorted(self.changed.elements())
                self.changed.clear()
                settings = [problem] if problem else [*self._settings(), *self._applied, *arguments, *changed]
                digest = zlib.crc32("\n".join(settings).encode())
                found = self._agree(digest, problem)
                self.had_open_gradients = found.has_open_gradients
                if found.has_open_gradients and not problem:
                    engine.forget_verdict()  # also where averaging raises
                    runtime.plain.average_open()
                    found = self._agree(digest, problem)
                if not problem:
                    runtime.copies.check(found)
        except _C.SettingsDiffer:  # on all ranks, so these may exchange more
            with agreement(
                runtime.ranks, "dmuon: clip_grad_norm_ or Muon.step", "the same settings on every rank"
            ) as facts:
                if problem is not None:
                    raise ValueError(problem) from None
                facts += settings
            raise
        except ValueError:
            engine.forget_verdict()  # if copies differ: else the next call would go on with it
            if problem is not None:
                raise ValueError(problem) from None
            raise
        if problem is not None:
            engine.forget_verdict()  # likewise
            raise ValueError(problem)
        return found

    def _agree(self, digest: int, problem: str | None) -> _C.Verdict:
        # If there is a problem, gradients that FSDP2 has not reduced may still be in flight.
        parameters = () if problem else self.host_parameters()
        runtime = self.runtime
        norms = host_gradients.squared_norms(parameters, runtime.device, runtime.ranks)
        maxima = self.after_step.maxima() if self.after_step else None
        return self._engine.agree(norms, digest, maxima, runtime.plain.has_open())

    def end_failed_backward(self, in_step: bool = False, before_use: bool = False) -> None:
        """Ends a backward that has raised, in the engine and in FSDP2. Notes if gradients are lost.

        They are, unless all were cleared after it. dmuon drops those of matrices, and FSDP2 drops some.

        Args:
            in_step: True if no forward has begun since, so that only `zero_grad` can have cleared them.
            before_use: True before a use of a unit that no forward of the model need surround: asks the engine alone.
        """
        failed = self._engine.end_failed_backward()
        if before_use and not failed:
            return
        if not _C.in_backward():  # a KeyboardInterrupt in a forward runs no hooks
            self.runtime.show_placeholders()
        try:
            failed = end_backward_of_fsdp2(self.runtime.fsdp_modules) or failed
        except AttributeError:
            if failed:
                self._lost = _NO_MORE.format(name_of(self.runtime.fsdp_modules[0], self.runtime.model))
            return
        if failed or self._lost is _LOST:
            parameters = (p for group in self.optimizer.param_groups for p in group["params"])
            are_cleared = not any(p.grad is not None for p in parameters)  # by whatever means
            if failed and (in_step or not are_cleared):
                self._lost = _LOST
            elif self._lost is _LOST and are_cleared and not in_step:
                self._lost = None

    def clear(self) -> None:
        """Notes that all gradients are cleared."""
        self.end_failed_backward()
        self.runtime.plain.made.clear()
        if self.after_step is not None:
            self.after_step.clear()
        if self._lost is _LOST:
            self._lost = None

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies all gradients by a [] of the device, equal on all ranks. Scales the verdict's norms too."""
        if factor.is_cpu and factor == 1:
            return  # the host reads it without waiting
        host_gradients.scale(self.host_parameters(), factor)
        self._engine.scale_gradients(factor)

    def owned_norms(self) -> tuple[torch.Tensor, ...]:
        """Returns [] fp32 for each leaf: the 2-norm of its gradient. Computed once a verdict, for torch's clipping."""
        if self._owned_norms is None or self._engine.verdict() is None:
            self._owned_norms = of_leaves(self.verdict().norms(), self.runtime.parts)
        return self._owned_norms

    def note_step(self) -> None:
        """Notes the hyperparameters of a step, for the next message to compare: a step after clipping sends none."""
        self._applied = [f"in the last step {setting}" for setting in self._settings()]

    def _settings(self) -> list[str]:
        of_groups = [
            line
            for number, group in enumerate(self.optimizer.param_groups)
            for line in (
                f"param_groups[{number}] of {len(group['params'])} parameters",
                *(f"param_groups[{number}]['{name}'] = {value!r}" for name, value in settings_of(group).items()),
            )
        ]
        records = f"record_stats = {self.optimizer.record_stats!r}"  # type: ignore[attr-defined]  # of dmuon.Muon
        removed = (f"the state of '{parameter._name}' removed" for parameter in self.removed)
        return [*of_groups, records, *removed, *(self.after_step.settings() if self.after_step else [])]

    def _problem(self) -> str | None:
        try:
            for number, group in enumerate(self.optimizer.param_groups):
                first_lr = self.first_lrs.get(group.get("algorithm"), 0.0)
                check_group(group, f"Muon: param_groups[{number}]", first_lr)
                if group["algorithm"] == "muon":
                    require_rule(group, self.rule, f"Muon: param_groups[{number}]")
            self._require_members()
            matrices = (group["params"] for group in self.optimizer.param_groups if group["algorithm"] == "muon")
            self.removed = removed_states(self.optimizer.state, itertools.chain.from_iterable(matrices))
        except Exception as error:  # of any kind, as for groups without a list: the other ranks must raise it too
            return message_of(error)
        if (name := self._assigned_gradient()) is not None:
            return (
                f"dmuon: the gradient of '{name}' was assigned, which its owner does not see. Expected: a change of "
                "what .grad is (mul_ and div_ by a number, zero_), or None in its place."
            )
        runtime = self.runtime
        num_slots = float(runtime.ranks.num_slots)
        return problem_of_factors(runtime.model, runtime.fsdp_modules, runtime.divide_factor, unset=num_slots)

    def _require_members(self) -> None:
        """Raises ValueError if two groups have a parameter, or one that nobody has prepared, such as to average it."""
        group_of: dict[torch.Tensor, int] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                is_member = parameter in self.members or parameter in self.runtime.plain
                if (first := group_of.setdefault(parameter, number)) != number or not is_member:
                    names = {id(p): f"'{name}'" for name, p in self.runtime.model.named_parameters()}
                    name = names.get(id(parameter), f"one of shape {tuple(parameter.shape)}")
                    raise ValueError(
                        f"Muon: param_groups[{number}]: expected parameters that opt.add_param_group has added and no "
                        f"other group has, got {name}" + (f", also in param_groups[{first}]" if first != number else "")
                    )

    def _assigned_gradient(self) -> str | None:
        """Returns the name of a leaf whose gradient's placeholder the user has replaced, or None."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"] if group["algorithm"] == "muon" else ():
                if not isinstance(parameter.grad, OwnedTensor | None):
                    return str(parameter._name)
        return None


def of_leaves(norms: torch.Tensor, parts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """Returns [] fp32 of each leaf, from the [] of each of its parts, which follow each other."""
    if any(len(indices) > 1 for indices in parts):
        norms = torch.stack(torch._foreach_norm(norms.split([len(indices) for indices in parts])))
    return norms.float().unbind()
