"""The second call: the optimizer.

Longer than other files because torch.optim.Optimizer is one class, and much of it is text for users.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.nn as nn

from dmuon import _C
from dmuon._planning.owner_plan import Plan
from dmuon._running.adamw import InnerAdamW
from dmuon._running.given_groups import Given
from dmuon._running.host_state import discard_unreduced
from dmuon._running.matrix_states import MatrixStates
from dmuon._running.optimizer_load import checked_state, write_state
from dmuon._running.owned_state import removed_states
from dmuon._running.skipped_steps import KEY as SKIPPED_STEPS
from dmuon._running.skipped_steps import SkippedSteps
from dmuon._running.start import agreed_setup, start
from dmuon._running.ungrouped import UngroupedParameters
from dmuon._running.update_stats import problem_of_recording
from dmuon._saving.optimizer_state import saved_state, with_saved_groups
from dmuon._setup.agreement import agreement
from dmuon._setup.dedication import dedication_of, one_model
from dmuon._setup.hyperparameters import (
    EPS,
    NS_COEFFICIENTS,
    NS_STEPS,
    RULE,
    NsCoefficients,
    check_group,
    native_group,
    require_rule,
    rule_of,
    rule_settings,
)
from dmuon._setup.members import Members
from dmuon._setup.routing_table import RoutingTable, with_frozen
from dmuon._setup.shown import shown
from dmuon._setup.wrappers import plain_module


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of `dedicate_params`, AdamW for every other trainable parameter.

    Make it after `fully_shard`; collective over the mesh. Computes the same as torch.optim.Muon on the gradient
    averaged over all ranks, or divided as `gradient_divide_factor` says. Momentum and master weights are in fp32, at
    the owner alone. Each algorithm has a group (`group["algorithm"]` is "muon" or "adamw"). Every step reads the
    hyperparameters.

    If a gradient on any rank is not finite, no rank changes anything. The step counts in `skipped_steps`, and slot 0
    logs it. On an accelerator nothing in a step waits for the device.

    Attributes:
        accepts_other_views: set to True to let `load_state_dict` load a state with other views (dmuon.views), other
            names, or other `muon_groups` of equal sizes.
        _step_supports_amp_scaling: set to True for torch.amp.GradScaler. The scaler then sets `grad_scale` if it has
            not unscaled, and always calls `step`, which itself finds values that are not finite on any rank. So the
            scaler does not wait for the device. False by default: with True, Lightning refuses to clip, and
            Accelerate takes no step for a skipped one.
        record_stats: set to True before a step whose figures `dmuon.update_stats` shall return. Other steps pay
            nothing.
    """

    accepts_other_views = False
    record_stats = False
    _step_supports_amp_scaling = False
    _is_made = False

    def __init__(
        self,
        model: nn.Module,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: NsCoefficients = NS_COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        rule: str = RULE,
        beta2: float = 0.95,
        cautious_weight_decay: bool = False,
        adamw_lr: float | torch.Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        adamw_groups: Sequence[dict[str, Any]] = (),
        muon_groups: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Plans owners, moves master weights to them and hooks the model.

        Args:
            model: the model given to `dedicate_params`, by now under `fully_shard` or plain.
            lr: Muon's learning rate, before `adjust_lr_fn`.
            weight_decay: decoupled weight decay, with the unadjusted lr.
            momentum: factor of the exponential mean of gradients.
            nesterov: True to orthogonalise a mix of gradient and momentum, False for the momentum alone.
            ns_coefficients: "polar_express", "quintic" (torch.optim.Muon's), "you", "cans", "deepseekv4" (ten steps),
                "cubic5" (five; docs/options.md), one (a, b, c), or a row for each step.
            eps: least divisor before Newton-Schulz, for matrices whose norm is less, as in torch.optim.Muon.
            ns_steps: number of Newton-Schulz steps. Steps past the given rows repeat the last row.
            adjust_lr_fn: None or "original": lr * sqrt(max(1, rows / cols)); "match_rms_adamw":
                lr * 0.2 * sqrt(max(rows, cols)); "spectral_unclamped": lr * sqrt(rows / cols).
            ns_dtype: dtype of the iteration. None means float16 on CUDA; on CPUs bfloat16 if the processor
                multiplies it faster than float32, else float32.
            rule: how the orthogonalised update moves weights. "muon"; or "normuon": divided by a second moment of each
                neuron (a row of an [out, in] matrix), then scaled to the norm that it had; or "adamuon": that of the
                direction's signs, divided by a second moment of each element; or a name given to
                `dmuon.rules.register`. All matrices have one rule.
            beta2: factor of the exponential mean of squares, for rules with a second moment. A user's rule reads it.
            cautious_weight_decay: True to decay only elements whose weight has the sign of its update, which is
                subtracted.
            adamw_lr: AdamW's learning rate. None means `lr` with "match_rms_adamw", else 3e-4.
            adamw_betas: AdamW's betas.
            adamw_eps: AdamW's eps.
            adamw_weight_decay: AdamW's weight decay. None means `weight_decay`.
            adamw_groups: groups in the form of torch's optimizers, for parameters that AdamW updates with options of
                their own: `[{"params": [...], "weight_decay": 0.0}]`. `params` is a list of names or parameters, or a
                function of name, module and parameter that returns True or False. The name of a module means what
                AdamW trains below it, and `*`, `?` and `[...]` in names match as in fnmatch. Parameters may have been
                taken from the model at any time. The `adamw_` arguments are the defaults of a group. Give the same
                groups on every rank.
            muon_groups: the same for matrices, `[{"params": ["vision"], "lr": 2e-3}]`. The other arguments are the
                defaults. In `param_groups` come Muon's rest, `muon_groups`, AdamW's rest, `adamw_groups`.

        Raises:
            ValueError: on every rank, if any rank finds something wrong or the ranks differ.
        """
        model = plain_module(one_model(model), "Muon")
        dedication = dedication_of(model, "Muon")
        adamw_lr_rule = "" if adamw_lr is not None else ", by adamw_lr=None"
        default = lr if adjust_lr_fn == "match_rms_adamw" else 3e-4
        muon: dict[str, Any] = {"algorithm": "muon", "lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        muon |= {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}
        muon |= {
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            **rule_settings(rule, beta2, cautious_weight_decay),
        }
        adamw: dict[str, Any] = {
            "algorithm": "adamw",
            "lr": default if adamw_lr is None else adamw_lr,
            "betas": adamw_betas,
            "eps": adamw_eps,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        given = Given(muon, adamw, muon_groups, adamw_groups)
        units, of_muon, of_adamw, device = agreed_setup(model, dedication, given)
        self._runtime = start(model, dedication, units, muon, device, optimizer=self)
        note = f"AdamW: lr {float(adamw['lr']):g}{adamw_lr_rule}"
        dedication.table = RoutingTable(with_frozen(dedication.table, model), note)
        for group in of_muon:
            group["params"] = [self._runtime.placeholders[index] for index in group["params"]]
        self._matrix_states = MatrixStates(self._runtime)
        self._ungrouped, self._adamw = UngroupedParameters(self._runtime), InnerAdamW()
        self._skipped = SkippedSteps(self._runtime.device, speaks=self._runtime.ranks.owner == 0)
        self._defaults_of, self._former = {"muon": muon, "adamw": adamw}, (dedication.former, dedication.replaced)
        self._runtime.step_agreement.first_lrs = {"muon": lr, "adamw": adamw["lr"]}
        with agreement(self._runtime.ranks, "Muon"):  # a rank may lack memory for AdamW's state, for example
            super().__init__([*of_muon, *of_adamw], {**muon})
            self.state.update(self._matrix_states.made())
        self._is_made = True
        dedication.runtime = self._runtime  # last, so that no call goes on with a half-made optimizer

    # ---- groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters that AdamW updates ("algorithm": "adamw", the default), or of matrices ("muon").

        `params` is as in the groups of `Muon`, and the arguments of `Muon` are the defaults. AdamW also takes
        parameters that the model does not have. All matrices have a group already: first take them out of its list.

        Raises:
            ValueError: the group has a parameter of another group, or of the other algorithm, or one that the model
                has no more, or a bad hyperparameter. Then nothing has changed.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise ValueError(f"add_param_group: expected a dict with 'params', got {shown(param_group)}")
        algorithm = param_group.get("algorithm", "adamw")
        if algorithm not in ("muon", "adamw"):
            raise ValueError(f"add_param_group: algorithm: expected 'muon' or 'adamw', got {algorithm!r}")
        added = {**self._defaults_of[algorithm], **param_group, SKIPPED_STEPS: self._skipped.count}
        check_group(added, "add_param_group")
        if algorithm == "muon":
            require_rule(added, rule_of(self._defaults_of["muon"]), "add_param_group")
        if self._is_made:
            added["params"] = self._new_members(param_group["params"], algorithm)
        before = dict(param_group)
        param_group.update(added)
        number = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            if algorithm == "adamw":
                for key in self._defaults_of["muon"].keys() - self._defaults_of["adamw"].keys():
                    param_group.pop(key, None)
                self._adamw.complete(param_group)
        except Exception:
            del self.param_groups[number:]
            param_group.clear()
            param_group.update(before)
            raise
        plain = self._runtime.plain_of(param_group["params"])
        self._runtime.step_agreement.members.update(set(param_group["params"]).difference(plain))
        if algorithm == "adamw":
            self._runtime.plain.add(plain, is_agreed=not self._is_made)  # at Muon all ranks have compared them
            self._ungrouped.note_added(param_group["params"] if self._is_made else [])
            self._adamw.make_state([param_group], self.state)

    def _new_members(self, params: Any, algorithm: str) -> list[torch.Tensor]:
        """Returns the parameters of a new group. Raises ValueError if one is in a group or cannot be in this one."""
        runtime, where = self._runtime, "add_param_group"
        runtime.access.refuse("add_param_group()", whole=True)
        members = Members(runtime.model, runtime.leaves, *self._former)
        found = members.resolved(params, algorithm, where, with_others=algorithm == "adamw")
        group_of = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        new = [member.parameter if member.leaf is None else runtime.placeholders[member.leaf] for member in found]
        for member, parameter in zip(found, new, strict=True):
            if parameter.is_complex():
                raise ValueError(f"{where}: params: '{member.name}': expected a real dtype, got {parameter.dtype}")
            if (number := group_of.get(parameter)) is not None:
                raise ValueError(
                    f"{where}: params: expected parameters that no group has, got '{member.name}', which is in "
                    f"param_groups[{number}]. Muon takes groups as muon_groups and adamw_groups; to move a parameter, "
                    "first remove it from that group's list."
                )
        return new

    # ---- the step ----

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.compiler.disable(reason="dmuon.Muon.step sends messages")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that had a gradient on any rank. Collective over the mesh.

        Raises:
            ValueError: the call is inside `full_params` or `Ema.applied`. Or, on all ranks: hyperparameters are bad or
                differ; a matrix's gradient was assigned; or the last backward was under `no_sync`, so that FSDP2 has
                not sent its gradients on.
        """
        self._runtime.access.refuse("step()", whole=True, averaged=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._runtime.one_thread.begin("step()")
        try:
            self._take_step()
        finally:
            self._runtime.one_thread.end()
        return loss

    def _take_step(self) -> None:
        runtime = self._runtime
        problem = problem_of_recording(runtime, self.record_stats)
        verdict = runtime.step_agreement.verdict(problem=problem)
        runtime.step_agreement.note_step()
        if (grad_scale := getattr(self, "grad_scale", None)) is not None:
            runtime.step_agreement.scale(grad_scale.double().reciprocal().float().to(runtime.device))
        finite = verdict.finite()
        groups, group_of = self._muon_groups(verdict.has_gradient)
        self._matrix_states.renew(self.state, runtime.step_agreement.removed)
        if self.record_stats:
            _C.begin_update_stats(runtime.engine)
        after = runtime.step_agreement.after_step
        row_factors = after.row_factors(verdict.maxima, finite, group_of) if after else {}
        adamw_groups = self._adamw_groups()
        self._adamw.prepare(adamw_groups, self.state)
        runtime.access.torn = {"model", "optimizer"}
        try:
            _C.muon_step(runtime.engine, groups, group_of, finite, runtime.graphs, row_factors)
            self._adamw.step(adamw_groups, self.state, finite)
            if after:
                after.scale_others()
            self._skipped.add(finite)
            runtime.access.torn.clear()
        finally:  # gradients are used up, also if an interrupt comes
            # After a forward without a backward FSDP2 would still compute with the old weights that it gathered.
            for module in runtime.fsdp_modules:
                module.reshard()
            runtime.engine.end_step()
            runtime.renew_version()
        self._ungrouped.warn(self.param_groups)

    def _adamw_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == "adamw"]

    def _muon_groups(self, has_gradient: list[bool]) -> tuple[list[_C.MuonGroup], list[int]]:
        groups: list[_C.MuonGroup] = []
        group_of = [-1] * len(has_gradient)
        for group in self.param_groups:
            if group["algorithm"] != "muon":
                continue
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                for index in self._runtime.parts[self._runtime.leaf_of[parameter]]:
                    if has_gradient[index]:
                        group_of[index] = len(groups)
            groups.append(native_group(group, self._runtime.device, self._runtime.tuned, self.record_stats))
        return groups, group_of

    @torch.compiler.disable(reason="dmuon.Muon.zero_grad changes FSDP2's state")  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, also the owners' accumulated ones and those that FSDP2 has not reduced yet.

        With `set_to_none=False` gradients are zeros, as in torch: a step decays weights and goes on along momenta.

        Raises:
            ValueError: FSDP2 has gradients of `no_sync`, in a place that is unknown for this PyTorch.
        """
        runtime = self._runtime
        runtime.access.refuse_forked("zero_grad()")
        runtime.one_thread.refuse_others("zero_grad()")
        runtime.engine.forget_verdict()
        has_sums = runtime.step_agreement.host_misses_partial_sums
        for parameter in discard_unreduced(runtime.fsdp_modules, has_sums()):
            if parameter.grad is None and not set_to_none:
                parameter.grad = torch.zeros_like(parameter)
        runtime.step_agreement.clear()
        if set_to_none:
            runtime.step_agreement.changed.clear()
        if has_sums():
            runtime.engine.host_sums().forget()
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
        if not set_to_none:
            runtime.plain.note_zeros(p for group in self.param_groups for p in group["params"])

    # ---- figures ----

    @property
    def skipped_steps(self) -> int:
        """Number of steps in which a gradient was not finite. Saved with the groups. Waits for the device."""
        return int(self._skipped.count)

    @property
    def plan(self) -> Plan:
        """The owners and batches of all parameters."""
        return self._runtime.plan

    def stats(self) -> dict[str, float]:
        """Returns this rank's counters since construction: seconds by part, messages, bytes sent, peak bytes.

        With DMUON_CUDA_GRAPHS=1 also the CUDA graphs of batches that were captured and launched.
        """
        counters = self._runtime.engine.statistics()
        if (graphs := self._runtime.graphs) is not None:
            counters |= {"graphs_captured": graphs.num_captures, "graphs_launched": graphs.num_launches}
        return counters

    # ---- saving and loading ----

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the form of torch's optimizers. Collective over the mesh.

        A matrix's `momentum_buffer` is a DTensor as fully_shard would have cut it, and so is a rule's second moment,
        `second_momentum_buffer`. A matrix that is no fp32 parameter has its fp32 weights as `master` too. AdamW's state
        exists for every parameter, as zeros before its first step.

        Raises:
            ValueError: the call is inside `Ema.applied`, or ranks have come to different calls.
        """
        self._runtime.meet("opt.state_dict()", averaged=True)
        before, after = self._optimizer_state_dict_pre_hooks, self._optimizer_state_dict_post_hooks
        with agreement(self._runtime.ranks, "Muon.state_dict") as facts:
            for prepare in before.values():
                prepare(self)
            self._adamw.make_state(self._adamw_groups(), self.state)
            removed = removed_states(self.state, self._runtime.leaf_of)
            facts += [f"the state of '{parameter._name}' removed" for parameter in removed]
        self._matrix_states.renew(self.state, removed)
        # Torch packs another object, so that this one is whole wherever an interrupt comes. Hooks before a save have
        # run, on the live state. The others see the groups as they are saved.
        of_torch = object.__new__(torch.optim.Optimizer)
        vars(of_torch).update(vars(self))
        of_torch.state = saved_state(self.state, self.param_groups, self._runtime.leaf_of, self._runtime.shards)
        of_torch._optimizer_state_dict_pre_hooks = OrderedDict()
        of_torch._optimizer_state_dict_post_hooks = OrderedDict()
        packed = torch.optim.Optimizer.state_dict(of_torch)
        packed = with_saved_groups(packed, self.param_groups, self._runtime.leaf_of, self._runtime.leaves)
        for hook in after.values():
            changed = hook(self, packed)
            packed = packed if changed is None else changed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state from `state_dict` or from torch's optimizers. Collective over the mesh.

        Values are DTensors as in `state_dict`, or whole tensors on every rank. Hyperparameters and `skipped_steps` load
        too; keys that a saved group lacks do not change. As in torch, the whole state is replaced: parameters without a
        saved state begin anew, and a warning names a matrix among them. The state of a matrix must have its rule's
        tensors. Its views must be the present ones, unless `accepts_other_views` is set. The rule must be saved as this
        optimizer's.

        Raises:
            ValueError: on all ranks, if something does not fit. Names it. Then nothing has changed.
        """
        runtime = self._runtime
        runtime.meet("opt.load_state_dict()", whole=True, averaged=True)
        before, after = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        state_dict, loaded = checked_state(self, state_dict, before.values(), runtime)
        runtime.access.torn.add("optimizer")  # if an interrupt comes
        # At once: nothing that may raise on some ranks alone comes between the check and the collective calls.
        write_state(runtime, loaded)
        try:
            # Hooks before a load have run. The others run at the end, where the state is whole.
            self._optimizer_load_state_dict_pre_hooks = OrderedDict()
            self._optimizer_load_state_dict_post_hooks = OrderedDict()
            super().load_state_dict({**state_dict, "state": loaded.by_torch, "param_groups": loaded.groups})
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = before, after
            for parameter, owned in self._matrix_states.made().items():
                owned.update(self.state[parameter])  # what the user has put there, on the parameter's device
                self.state[parameter] = owned
            self._skipped.load(self.param_groups)
            for group in self._adamw_groups():
                self._adamw.complete(group)
            self._adamw.make_state(self._adamw_groups(), self.state)
        runtime.access.torn.discard("optimizer")
        for hook in after.values():
            hook(self)
