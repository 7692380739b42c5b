"""`dmuon doctor`: its sections, what it says of a broken machine, and that it ends whatever hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dmuon._command.main import main
from dmuon._doctor import examine, rank, ranks
from dmuon._doctor.child import Child
from dmuon._doctor.findings import Findings, Section
from dmuon._doctor.network import network
from dmuon._planning.choices import Result, Setting, store

from dmuon import _C

TITLES = [title for _, title, _ in examine._SECTIONS]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def doctor(capsys, monkeypatch, tmp_path):
    """Runs the command with some of its sections; gives its status, output, and sections by their names."""

    def run(*names):
        chosen = [one for one in examine._SECTIONS if one[0] in names or not names]
        monkeypatch.setattr(examine, "_SECTIONS", chosen)
        file = tmp_path / "doctor.json"
        status = main(["doctor", "--json", str(file)])
        printed = capsys.readouterr()
        assert printed.err == ""
        sections = json.loads(file.read_text())["sections"]
        return status, printed.out, {one[0]: section for one, section in zip(chosen, sections, strict=True)}

    return run


def found_by(function) -> Section:
    section = Section("")
    function(Findings(section.take))
    return section


def test_every_section_is_there_and_all_self_tests_pass(doctor):
    status, out, sections = doctor()
    assert status == 0, out
    short, pasted = out.split("To paste into an issue, between the lines:\n")
    assert "All self-tests passed." in short
    assert [line for line in short.splitlines() if line in TITLES] == TITLES
    first, *lines, last = pasted.splitlines()
    assert first == last == "-" * 20
    assert [line[1:-1] for line in lines if line[0] == "["] == TITLES
    facts = {name: dict(section["facts"]) for name, section in sections.items()}
    assert facts["versions"]["PyTorch"].startswith(torch.__version__)
    assert facts["versions"]["compiler of dmuon"] != "unknown"
    assert "lo 127.0.0.1" in facts["network"]["interfaces"]
    assert facts["kernels"].pop("CUDA kernels") == (
        _C.why_no_cuda_kernels(torch.device("cuda")) or "dmuon's own run on cuda:0"
    )
    assert {name.split()[1] for name in facts["kernels"]} == {"fp32", "bf16", "fp16", "fp64"}
    tests = facts["kernels"] | {name: value for name, value in facts["ranks"].items() if "mesh" in name}
    assert "2 ranks on cpu, mesh 1x2" in tests and "2 ranks on cpu, mesh 2x1" in tests
    assert all(value.endswith(": ok") for value in tests.values())
    kinds = {"broadcast", "reduce", "send and receive", "host all-reduce", "host all-gather"}
    assert {f"cpu {kind}" for kind in kinds} <= facts["ranks"].keys()
    assert any("dmuon tune" in command for _, command in sections["tuned"]["hints"])
    for section in sections.values():
        assert section["failures"] == section["details"] == []
        assert all(f"{name}: {value}" in lines for name, value in section["facts"])


def test_a_backend_that_is_wrong_is_named_and_fails_the_command(doctor, monkeypatch):
    right = _C.orthogonalize

    def wrong(x, rows, steps, eps, dtype, choice):
        y = right(x, rows, steps, eps, dtype, choice=choice)
        return y * 1.2 if dtype == torch.bfloat16 and choice.backend == "cpu" and x.shape[1:] == (129, 257) else y

    monkeypatch.setattr(_C, "orthogonalize", wrong)
    status, out, sections = doctor("devices", "kernels", "tuned")
    assert status == 1 and f"FAILED: {TITLES[3]}\n" in out
    (failure,) = sections["kernels"]["failures"]
    assert failure.startswith("cpu bf16 cpu") and "on cpu, " in failure and failure.endswith("(1, 129, 257)")
    others = [value for name, value in sections["kernels"]["facts"] if not name.startswith(("cpu bf16 cpu", "CUDA"))]
    assert others and all(value.endswith(": ok") for value in others)
    assert sections["tuned"]["facts"]


def test_a_dtype_whose_backend_raises_hides_no_other(doctor, monkeypatch):
    right = _C.orthogonalize

    def raises(x, rows, steps, eps, dtype, choice):
        if dtype == torch.float16:
            raise RuntimeError("no such\nkernel")
        return right(x, rows, steps, eps, dtype, choice=choice)

    monkeypatch.setattr(_C, "orthogonalize", raises)
    status, _, sections = doctor("kernels")
    assert (status, sections["kernels"]["failures"]) == (1, ["cpu fp16: RuntimeError: no such kernel"])
    assert any(name.startswith("cpu fp64") for name, _ in sections["kernels"]["facts"])


def test_a_section_that_crashes_hides_no_other_and_leaves_its_traceback(doctor, monkeypatch):
    monkeypatch.setattr("dmuon._doctor.devices._processor", lambda _: os.kill(os.getpid(), signal.SIGSEGV))
    status, out, sections = doctor("versions", "devices", "network")
    assert status == 1 and sections["versions"]["facts"] and sections["network"]["facts"]
    assert sections["devices"]["failures"] == ["died of SIGSEGV"]
    assert "Segmentation fault" in sections["devices"]["details"][0] and "Segmentation fault" in out


def test_without_pytorch_the_rest_is_still_said(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, sections = doctor("versions", "network", "tuned")
    assert status == 1 and "ModuleNotFoundError" in sections["versions"]["failures"][0]
    assert dict(sections["versions"]["facts"])["Python"] and sections["network"]["facts"]


def test_ranks_that_end_elsewhere_fail(doctor, monkeypatch):
    monkeypatch.setattr(rank, "_FURTHEST", 0.0)
    status, _, sections = doctor("ranks")
    assert status == 1 and len(sections["ranks"]["failures"]) == 2
    assert "cpu broadcast" in dict(sections["ranks"]["facts"])


def test_a_rank_that_hangs_is_ended_with_what_it_started(doctor, monkeypatch, tmp_path):
    def hang(findings, spot):
        if spot.rank == 1:
            Path(tmp_path, "pids").write_text(f"{os.getpid()} {Child(600, time.sleep_long).pid}")
            time.sleep(600)

    monkeypatch.setattr(time, "sleep_long", lambda _: time.sleep(600), raising=False)
    monkeypatch.setattr(ranks, "rank", hang)
    monkeypatch.setattr(ranks, "_LIMIT_S", 3.0)
    status, _, sections = doctor("ranks")
    assert (status, sections["ranks"]["failures"]) == (1, ["2 ranks on cpu: rank 1: did not end within 3 s"])
    assert "in hang" in sections["ranks"]["details"][0]
    for pid in Path(tmp_path, "pids").read_text().split():
        assert is_gone(int(pid))


def test_a_rank_that_raises_is_named_and_its_peer_does_not_hang(doctor, monkeypatch):
    def alone(findings, spot):
        if spot.rank == 0:
            time.sleep(600)
        raise ValueError("no such message")

    monkeypatch.setattr(ranks, "rank", alone)
    monkeypatch.setattr(ranks, "_ALONE_S", 0.5)
    status, _, sections = doctor("ranks")
    first, second = sections["ranks"]["failures"]
    assert (status, first) == (1, "2 ranks on cpu: rank 1: ValueError: no such message")
    assert second.startswith("2 ranks on cpu: rank 0: did not end within ") and float(second.split()[-2]) < 60


def is_gone(pid: int) -> bool:
    """True if a process ends within seconds, be it that nobody has waited for it."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1: "),
        ("TORCH_DIST_USE_NCCL2", "1", "TORCH_DIST_USE_NCCL2"),
        ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE"),
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING"),
        ("GLOO_SOCKET_IFNAME", "ib77", "there is no interface ib77"),
    ],
)
def test_a_variable_that_matters_is_shown_with_a_hint(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    section = found_by(network)
    assert (name, value) in section.facts
    assert any(reason.startswith(words) for reason, _ in section.hints)


def test_variables_as_they_should_be_give_no_hint(monkeypatch):
    for name in ("TORCH_DIST_USE_NCCL2", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    section = found_by(network)
    assert not [reason for reason, _ in section.hints if "ulimit" not in reason and "sockets" not in reason]
    assert ("gloo takes", "lo, from GLOO_SOCKET_IFNAME") in section.facts


def test_what_was_tuned_here_is_counted_and_what_was_elsewhere_is_not(doctor, tmp_path):
    choice = ("cpu", "DIRECT", False, 0, "")
    rows = _C.resolve_coefficients("polar_express", 5)
    setting = Setting(torch.device("cpu"), _C.default_ns_dtype(torch.device("cpu")), rows)
    store(Result(1, 16, 16, *choice, 1, 0.1, *choice, 1, 0.1, 1.0), setting)
    (file,) = (tmp_path / "cache" / "tuned").iterdir()
    held = json.loads(file.read_text())
    file.with_name("other.json").write_text(json.dumps(held | {"key": held["key"] | {"torch": "1.0"}}))
    file.with_name("damaged.json").write_text("{")
    status, _, sections = doctor("tuned")
    facts = dict(sections["tuned"]["facts"])
    assert status == 0 and sections["tuned"]["hints"] == []
    dtype = held["key"]["ns_dtype"]
    assert facts[held["key"]["device"]].startswith(f"1 shapes, {dtype}, 5 steps from (7.893, ")
    assert (facts["files of other machines or versions"], facts["unreadable files"]) == ("1", "1")


@pytest.mark.parametrize("steps", [5, 7])
def test_what_was_tuned_for_other_steps_or_dtypes_is_not_what_muon_runs_by_default(doctor, steps):
    choice = ("cpu", "DIRECT", False, 0, "")
    dtype = _C.default_ns_dtype(torch.device("cpu")) if steps != 5 else torch.float16
    setting = Setting(torch.device("cpu"), dtype, _C.resolve_coefficients("polar_express", steps))
    store(Result(1, 16, 16, *choice, 1, 0.1, *choice, 1, 0.1, 1.0), setting)
    section = doctor("tuned")[2]["tuned"]
    assert any("1 shapes" in text and f"{steps} steps" in text for _, text in section["facts"])
    (hint,) = section["hints"]
    assert "for Muon's defaults on" in hint[0]


def test_a_file_that_cannot_be_written_is_said_before_the_work(capsys, monkeypatch):
    monkeypatch.setattr(examine, "_run", None)
    assert main(["doctor", "--json", "/nowhere/doctor.json"]) == 2
    assert capsys.readouterr() == (
        "",
        "dmuon: --json: cannot write '/nowhere/doctor.json': No such file or directory\n",
    )


@pytest.mark.xdist_group("async_device")
@pytest.mark.parametrize("count", [1, 2])
def test_accelerators_are_tested_alone_and_with_two_ranks(count, tmp_path):
    """On the emulated device, in a program of its own: the device belongs to a process."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "async_device")!r})
import async_device, torch
from dmuon._command.main import main
from dmuon._doctor import examine, kernels, ranks
kernels._PANELS, kernels._SHAPES = ((1, 12, 8),), ((1, 5, 3),)
torch.accelerator.device_count = lambda: {count}
examine._SECTIONS = [one for one in examine._SECTIONS if one[0] in ("devices", "kernels", "ranks")]
sys.exit(main(["doctor", "--json", {str(tmp_path / "doctor.json")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    devices, kernels, trained = (
        dict(section["facts"]) for section in json.loads((tmp_path / "doctor.json").read_text())["sections"]
    )
    assert [name for name in devices if name.startswith("emulated:")] == [f"emulated:{i}" for i in range(count)]
    places = {
        1: ("emulated:0", "2 ranks on emulated:0"),
        2: ("emulated:0 to 1", "2 ranks on emulated:0 and emulated:1"),
    }
    assert f"{places[count][0]} fp16 aten (default)" in kernels
    assert {"1 process on emulated:0", f"{places[count][1]}, mesh 1x2"} <= trained.keys()
    assert {"emulated:0 reduce", "emulated:0 all-gather", "emulated:0 reduce-scatter"} <= trained.keys()
