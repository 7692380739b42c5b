"""The contract: which training programs dmuon trains exactly, and which it refuses. There is no third kind."""

from __future__ import annotations

from known_orders import Known, managed
from program import Pass, Program

# What one rank alone may do in a step (`Program.astray`), so that it can never meet the others again.
ASTRAY = {
    "reorders": "a rank uses blocks in another order",
    "repeats": "a rank uses the last block once more",
    "adds": "a rank runs a forward and a backward more",
    "evaluates": "a rank runs an evaluation that the others do not",
    "no backward": "a rank skips the backward of a micro-step that is not the last",
    "no_sync": "a rank is under no_sync where the others are not",
    "no step": "a rank leaves a step out",
    "clips": "a rank clips where the others do not, or the reverse",
    "saves": "a rank enters full_params alone",
    "raises": "a rank raises",
}


INFERENCE_FIRST = "FSDP2's first forward is under inference_mode"
MIXED_SUMS = "micro-steps under no_sync use other parameters of FSDP2"
# What FSDP2 may refuse before dmuon does, and how.
MIXED_THEN_ZEROED = MIXED_SUMS + ", whose sums are set to zero"
LEFT_OFF_THEN_EVALUATED = "a flag of FSDP2's stays off, and a forward without a backward follows"
UNUSED = "FSDP2's flag is off before it has gathered all that it manages"  # it fails then, if dtypes differ
FSDP2S_OWN = {
    INFERENCE_FIRST: "[Ii]nference tensor",
    MIXED_SUMS: "size of tensor",
    MIXED_THEN_ZEROED: "size of tensor",
    UNUSED: "_unsharded_param",
}


def refusal(program: Program) -> str:
    """Why dmuon must raise on every rank, within seconds; empty where it must train exactly as one process.

    Three reasons allow dmuon to train exactly as well (`may_train`). Where ranks differ in an order, what they need of
    each other may be there already. Mixed sums do no harm if zero_grad() drops them; FSDP2 may refuse them before. The
    next forward, of whichever modules, finishes what FSDP2 keeps for the last backward.

    Ranks do the same in every step, but for three things that they may do differently:

    - their data;
    - which blocks they skip, where all ranks use the others in an order that the passes before have made known. The
      first pass of each kind (training forward, evaluation, backward) makes one known; a backward in another order,
      or a forward over a block that was not in it, makes the next pass's known. Blocks in which `fully_shard`
      manages parameters are skipped by all ranks or by none, for FSDP2's own collectives must meet;
    - whether they run the last backward before a step, where `fully_shard` manages nothing and a backward's order is
      known, and no second model comes between.
    """
    if program.astray:
        return ASTRAY[program.astray]
    if reason := _inference_first(program) or _unused(program) or _mixed_sums(program) or _left_off(program):
        return reason
    watch = Known(program)
    for step in program.steps:
        for index, micro in enumerate(step.micros):
            last = index == len(step.micros) - 1 and (step.ends != "discarded" or step.clips)
            if reason := watch.run(micro, step, last):
                return reason
        if step.reloads:
            watch = Known(program)
    return ""


def may_train(reason: str) -> bool:
    """True if a program with this reason to be refused may also be trained, exactly."""
    return reason in (MIXED_THEN_ZEROED, LEFT_OFF_THEN_EVALUATED) or reason.startswith("ranks differ in")


def _inference_first(program: Program) -> str:
    """FSDP2 makes its buffers in a module's first forward; made under inference_mode, they serve nothing else."""
    made: set[int] = set()  # blocks whose buffers are made; -1: the root's
    for_inference: set[int] = set()
    for step in program.steps:
        for micro in step.micros:
            if micro.evaluation == "inference_mode":
                for_inference |= _with_buffers(micro.evaluated, program) - made
                made |= for_inference
            for chosen in (micro.evaluated, micro.forward) if micro.evaluation == "no_grad" else (micro.forward,):
                uses = _with_buffers(chosen, program)
                if uses & for_inference:
                    return INFERENCE_FIRST
                made |= uses
        if step.reloads:
            made, for_inference = set(), set()
    return ""


def _unused(program: Program) -> str:
    unused = _with_buffers(Pass(tuple(range(len(program.blocks)))), program) if program.dtype == "bf16" else set()
    for step in program.steps:
        for index, micro in enumerate(step.micros):
            unused -= _with_buffers(micro.forward, program) | _with_buffers(micro.evaluated, program)
            off = step.off == "requires_gradient_sync" and (step.stays_off or index < len(step.micros) - 1)
            if off and unused and micro.backward != "dropped":
                return UNUSED
    return ""


def _mixed_sums(program: Program) -> str:
    """Between nodes FSDP2 adds up what it keeps under no_sync without looking which parameters it is of."""
    if program.wrap == "none" or len(program.mesh) < 2 or program.mesh[0] == 1:
        return ""
    dropped = ""
    for step in program.steps:
        held: frozenset[int] | None = None
        mixed = False
        for micro in step.micros:
            if micro.backward == "dropped":
                continue
            known = Known(program)
            uses = frozenset(
                index
                for index in known.with_gradient(micro.forward.of(0), step)
                if managed(program.blocks[index], program.wrap)
            )
            mixed = mixed or held not in (None, uses)
            held = None if micro.synced or micro.zeroed else uses
            if mixed and micro.zeroed:
                mixed, dropped = False, MIXED_THEN_ZEROED
        if mixed:
            return MIXED_SUMS
        if held is not None and (step.clips or step.ends != "discarded"):
            return "FSDP2 has not summed gradients over the replicates"
    return dropped


def _left_off(program: Program) -> str:
    """FSDP2's own flag is off in the last backward before clip or step, so that AdamW's parameters miss a part."""
    replicated = len(program.mesh) > 1 and program.mesh[0] > 1
    for step in program.steps:
        if program.wrap == "none" or not step.off or (step.off == "requires_all_reduce" and not replicated):
            continue
        misses = evaluated = False
        for index, micro in enumerate(step.micros):
            if micro.backward != "dropped":
                misses = step.stays_off or index < len(step.micros) - 1
            misses = misses and (not micro.zeroed or step.off == "is_last_backward")
            evaluated = bool(micro.evaluation)
        if misses and (step.clips or step.ends != "discarded"):
            # A forward finishes what waits for the last backward.
            may_train = evaluated and step.off == "is_last_backward"
            return LEFT_OFF_THEN_EVALUATED if may_train else "a flag of FSDP2's stays off"
    return ""


def _with_buffers(chosen: Pass, program: Program) -> set[int]:
    if program.wrap == "none":
        return set()
    own = program.wrap != "root"
    return {-1} | {use for use in chosen.of(0) if own and managed(program.blocks[use], program.wrap)}
