"""A rank that is lost, late or astray takes the others with it: they raise in time, none trains on, and all end.

Twenty points between two of dmuon's triggers at which a rank is killed are chosen by a seed; FAULTS_SEED in the
environment chooses others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_program import (
    AFTER_AGREEMENT,
    ALONE,
    BEFORE_AGREEMENT,
    DEVIATIONS,
    IN_A_PASS,
    NUM_RANKS,
    SWAPS,
    TIMEOUT_S,
    Case,
)

pytestmark = [
    pytest.mark.xdist_group("faults"),  # one process runs all cases, several at once
    pytest.mark.cpu("each case names its device"),
]
NUM_KILLS = 20
# Limits for hangs, on machines with other work too. Where a rank sleeps or dies, the others raise after up to
# TIMEOUT_S, and what is in flight then may take as long again before a process ends. Everywhere else timeouts are
# longer than these limits: ranks find out by themselves that they wait in vain.
RAISE_S = 10 * TIMEOUT_S
EXIT_S = 10 * TIMEOUT_S
AT_ONCE = 3  # cases; their ranks mostly wait
# Ours; or what gloo says in FSDP2's collectives and in those of torch.distributed.
OURS = (
    r"dmuon: (.* failed: a rank died, did not come within the timeout, or issued something else|"
    r"ranks wait for each other in vain)"
)
THEIRS = r"gloo.*(Connection (closed|reset) by peer|Timed out waiting|Connection refused|Broken pipe)|pair closure"
# What follows ours: who has not come to what a rank awaited, and what each rank told last.
ATTENDANCE = (
    r"\n(?:All ranks of the mesh have come to|Not come to) [^\n]* \((operation|comparison|agreement|update) (\d+)\)"
    r"(?:: rank ([\d, ]+) of the mesh)?\. What ranks told last:\n"
)
LINE = r"^  rank (\d) of the mesh has (?:issued (\d+) operations|told nothing)"
ASTRAY = r"dmuon: ranks (have issued different operations|disagree|clip or step different models)"


def kills(seed: int) -> list[Case]:
    """Different points; each value of an option occurs equally often."""
    rng = random.Random(seed)

    def evenly(*values: Any) -> list[Any]:
        drawn = [values[i * len(values) // NUM_KILLS] for i in range(NUM_KILLS)]
        rng.shuffle(drawn)
        return drawn

    points = [*rng.sample(IN_A_PASS, NUM_KILLS - 5), BEFORE_AGREEMENT, *AFTER_AGREEMENT]
    columns = {
        "step": evenly(0, 2),
        "micro": evenly(0, 1),
        "victim": evenly(*range(NUM_RANKS)),
        "mesh": evenly((4,), (2, 2)),
        "fsdp": evenly(False, True),
        "lookahead": evenly(0, 2),
        "micro_steps": evenly(1, 2),
        "insists": evenly(False, True),
    }
    cases = []
    for point, *values in zip(points, *columns.values(), strict=True):
        options = dict(zip(columns, values, strict=True))
        options["micro"] = min(options["micro"], options["micro_steps"] - 1)
        cases.append(Case("dies", point, clips=point == "clipped" or rng.random() < 0.3, **options))
    return cases


CASES = [
    *kills(int(os.environ.get("FAULTS_SEED", "0"))),
    Case("sleeps", "block 1 computes", fsdp=True),
    Case("sleeps", "block 1 backward begins", mesh=(4,), victim=2),
    Case("sleeps", "block 0 enters", step=0, victim=3),
    Case("sleeps", "gradients cleared", victim=0, insists=True),
    Case("dies", "block 1 computes", victim=3, lingers=True),
    Case("dies", "block 2 gradient comes", fsdp=True, victim=2, lingers=True),
    Case("dies", "step ends", mesh=(4,), victim=0, insists=True, lingers=True),
    Case("raises", "block 1 computes", victim=2),
    Case("raises", "block 1 backward ends", fsdp=True, mesh=(4,), victim=0),
    Case("raises", "gradients cleared", victim=3),
    Case("raises", "block 1 computes", stays=True),
    Case("raises", "step begins", victim=2, stays=True),
    Case("raises", "block 1 computes", fsdp=True, stays=True),
    Case("raises", "block 0 computes", drops=True),
    Case("raises", "block 1 backward ends", victim=3, drops=True),
    Case("dies", "gradients cleared", victim=2, drops=True),
    Case("reorders"),
    Case("reorders", mesh=(4,), victim=0),
    Case("reorders", fsdp=True, victim=3),
    Case("repeats", mesh=(4,), insists=True),
    Case("repeats", victim=2, lookahead=0),
    Case("repeats", victim=3, micro_steps=2),
    Case("trains in opposite order"),
    Case("computes in opposite order", mesh=(4,), fsdp=True),
    Case("steps in opposite order", victim=2, fsdp=True),
    Case("full_params", victim=0),
    Case("full_params", victim=0, mesh=(4,), fsdp=True),
    Case("full_params", mesh=(4,), fsdp=True, listed=True),
    Case("full_params", victim=2, stays=True),
    Case("full_params", victim=2, fsdp=True, stays=True),
    Case("evaluates", victim=0),
    Case("evaluates", victim=0, mesh=(4,), fsdp=True),
    Case("evaluates", victim=0, fsdp=True, evaluated=True),
    Case("evaluates", victim=1, mesh=(4,), evaluated=True, lookahead=0),
    # On a device with streams, where the host runs ahead of what is stuck.
    Case("raises", "block 1 computes", victim=2, device="emulated", stays=True),
    Case("raises", "block 1 backward ends", mesh=(4,), victim=0, device="emulated", stays=True, lingers=True),
    Case("raises", "step begins", victim=3, device="emulated", stays=True),
    Case("raises", "block 0 computes", fsdp=True, device="emulated"),
    Case("dies", "block 1 backward begins", victim=3, device="emulated"),
    Case("dies", "gradients cleared", mesh=(4,), fsdp=True, device="emulated"),
    Case("sleeps", "block 1 computes", victim=1, device="emulated"),
    Case("sleeps", "block 1 computes", victim=1, device="emulated", silent=True),
    Case("sleeps", "block 1 computes", victim=2, fsdp=True, device="emulated", silent=True),
    Case("steps in opposite order", victim=2, fsdp=True, device="emulated"),
    Case("dies", BEFORE_AGREEMENT, victim=3, lingers=True),
    Case("reorders", device="emulated"),
    Case("repeats", mesh=(4,), victim=2, device="emulated"),
]


class Outcome:
    """What the ranks of a case left in its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ends = {int(rank): end for rank, end in json.loads((directory / "ends").read_text()).items()}

    def events(self, rank: int, name: str) -> list[dict[str, Any]]:
        path = self.directory / f"{rank}.events"
        events = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [event for event in events if event["name"] == name]

    def stderr(self, rank: int) -> str:
        return (self.directory / f"{rank}.stderr").read_text(errors="replace")[-8000:]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Of the cases that this session runs, several at once."""
    items = [item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
    cases = [item.callspec.params["case"] for item in items]
    return dict(zip(cases, run_all(cases, tmp_path_factory.mktemp("faults")), strict=True))


def run_all(cases: list[Case], directory: Path) -> list[Outcome]:
    zygote = [sys.executable, str(Path(__file__).parent / "faults_zygote.py")]
    directories = [directory / str(number) for number in range(len(cases))]
    with subprocess.Popen(zygote, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        for number, (case, place) in enumerate(zip(cases, directories, strict=True)):
            if number >= AT_ONCE:
                process.stdout.readline()
            place.mkdir()
            process.stdin.write(json.dumps({"case": dataclasses.asdict(case), "directory": str(place)}) + "\n")
        for _ in cases[:AT_ONCE]:
            process.stdout.readline()
    return [Outcome(place) for place in directories]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_other_rank_raises_in_time_and_none_trains_on(case: Case, outcomes: dict[Case, Outcome]):
    outcome = outcomes[case]
    strikes = outcome.events(case.victim, "strike")
    assert len(strikes) == 1, outcome.stderr(case.victim)
    for rank in range(NUM_RANKS):
        if rank != case.victim:
            check_survivor(case, outcome, rank, strikes[0]["time"])
    check_victim(case, outcome)
    if case.fault in ALONE:
        check_what_was_called_alone(case, outcome)


def check_survivor(case: Case, outcome: Outcome, rank: int, struck: float) -> None:
    who = f"rank {rank} in {outcome.directory}"
    assert not outcome.events(rank, "trained on"), f"{who} has not noticed"
    errors = outcome.events(rank, "raised")
    assert len(errors) == 1 + case.insists, f"{who}: {outcome.stderr(rank)}"
    for before, error in zip([struck, *(error["time"] for error in errors)], errors, strict=False):
        check_error(case, error, who)
        assert 0 <= error["time"] - before <= RAISE_S, f"{who} after {error['time'] - before:.1f} s: {error}"
    assert len(outcome.events(rank, "step")) <= case.most_steps, f"{who} trained on"
    if case.stays:
        assert errors[-1]["time"] < outcome.ends[case.victim][0], (
            f"{who} has noticed only that the victim's process ended"
        )
        # A wait outside of the engine ends with an error of gloo's, after a warning.
        outside = not re.search(OURS, errors[0]["message"])
        text = outcome.stderr(rank) if outside else errors[0]["message"]
        assert f"rank {case.victim} of the mesh" in text, f"{who}: {errors[0]}"
    if case.fault == "sleeps" and re.search(OURS, errors[0]["message"]):
        assert case.victim in absent_ranks(errors[0]["message"]), f"{who}: {errors[0]}"
    check_end(case, outcome, rank)


def check_what_was_called_alone(case: Case, outcome: Outcome) -> None:
    """Whoever has an error of ours knows the rank and the call; the victim, for whom it has waited."""
    messages = [outcome.events(rank, "raised")[0]["message"] for rank in range(NUM_RANKS)]
    ours = [message for message in messages if re.search(OURS, message)]
    assert messages[case.victim] in ours and (case.fsdp or len(ours) == NUM_RANKS)
    for message in ours:
        says = ALONE[case.fault] + (str(1 + case.evaluated) if case.fault == "evaluates" else "")
        assert re.search(f"rank {case.victim} (of the mesh has issued|(is )?in) [^;]*{says}", message), message
    if case.fault == "full_params":
        assert absent_ranks(messages[case.victim]) == set(range(NUM_RANKS)) - {case.victim}


def check_error(case: Case, error: dict[str, Any], who: str) -> None:
    if case.fault in (*DEVIATIONS, *SWAPS) and re.search(ASTRAY, error["message"]):
        assert "ValueError" in error["kinds"], f"{who}: {error}"
        return
    assert "RuntimeError" in error["kinds"], f"{who}: {error}"
    assert re.search(f"{OURS}|{THEIRS}", error["message"]), f"{who}: {error}"
    if re.search(OURS, error["message"]) and "Reported: dmuon" not in error["message"]:  # a message of Python's
        absent_ranks(error["message"])


def absent_ranks(message: str) -> set[int]:
    """The ranks of the mesh that have not come, by an error of ours; the lines of its table agree."""
    found = re.search(ATTENDANCE, message)
    assert found, message
    what, number, ranks = found.groups()
    absent = {int(rank) for rank in ranks.split(", ")} if ranks else set()
    issued = {int(rank): int(count or 0) for rank, count in re.findall(LINE, message, re.MULTILINE)}
    assert issued.keys() == set(range(NUM_RANKS)), message
    if what == "operation":
        assert absent == {rank for rank, count in issued.items() if count < int(number)}, message
    return absent


def check_end(case: Case, outcome: Outcome, rank: int) -> None:
    """As a script ends that raised: no crash, and no wait for ever."""
    ended, code = outcome.ends[rank]
    assert code == 1, f"rank {rank} ended with {code}: {outcome.stderr(rank)}"
    assert [event["freed"] for event in outcome.events(rank, "dropped")] == [True] * case.drops
    (gave_up,) = outcome.events(rank, "gives up")
    assert ended - gave_up["time"] <= EXIT_S, f"rank {rank} took {ended - gave_up['time']:.1f} s to end"


def check_victim(case: Case, outcome: Outcome) -> None:
    if case.fault == "dies":
        assert outcome.ends[case.victim][1] == -signal.SIGKILL
        return
    assert not outcome.events(case.victim, "trained on")
    assert len(outcome.events(case.victim, "step")) <= case.most_steps
    errors = outcome.events(case.victim, "raised")
    assert len(errors) == 1, f"the victim in {outcome.directory}: {outcome.stderr(case.victim)}"
    if case.fault == "raises":
        assert errors[0]["kinds"][0] == "OwnFault", errors
    else:
        check_error(case, errors[0], "the victim")
    check_end(case, outcome, case.victim)
