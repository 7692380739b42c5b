"""tools/cluster: its nodes train as others do, its bandwidth is limited, and nothing of it stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu("it is about a tool that starts programs")
HERE = Path(__file__).parent
# Limits for hangs: a run takes up to 10 s on an idle machine, and to end it less than one.
RUN_S = 600
END_S = 60
TOOL = [str(HERE.parents[1] / "tools/cluster"), "--python", sys.executable]
# Prints the namespaces of a rank, then lets rank 3 fail where it is told to; the others wait for good.
WAITING = """
import os, sys, time
print(*(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")), flush=True)
if sys.argv[1] == "fail" and os.environ["RANK"] == "3":
    print("rank 3 has had enough")
    sys.exit(9)
time.sleep(600)
"""
# The host group of four ranks whose hosts' names lead nowhere, as on many machines whose NCCL is well set up. Gloo
# chooses its interface by itself if told to.
HOST_GROUP = """
import contextlib, datetime, os, sys, torch, torch.distributed as dist
from dmuon._setup import groups, new_groups
from dmuon._setup.ranks import Ranks
dist.init_process_group("cuda:gloo")
del os.environ["GLOO_SOCKET_IFNAME"]
if sys.argv[1] == "by itself":
    new_groups.reachable_interface, new_groups._CONNECT = contextlib.nullcontext, datetime.timedelta(seconds=5)
rows = ((0, 1), (2, 3))
try:
    group = groups.everyone_group(Ranks(rows, dist.get_rank(), "cuda", None, rows))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print(total.item(), group._get_backend(torch.device("cpu")).options._timeout, flush=True)
except ValueError as error:
    print(error, flush=True)
os._exit(0)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*TOOL, *words], capture_output=True, text=True, timeout=RUN_S)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    return done


def members(namespaces: list[str]) -> list[str]:
    """Processes in any of them, now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for kind in ("net", "pid"):
            try:
                if os.readlink(process / "ns" / kind) in namespaces:
                    found.append(process.name)
            except OSError:  # it has ended, or is not ours
                continue
    return found


def test_two_nodes_train_as_one_process_does():
    done = run("--nodes", "2", "--ranks", "2", "--rate", "100mbit", "--", str(HERE / "cluster_script.py"), "100e6")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is well\n"


def test_hosts_meet_without_a_word_of_the_user_if_their_names_lead_nowhere():
    done = run("--", "-c", HOST_GROUP, "as chosen")
    assert done.stdout.strip() == "4.0 0:30:00", done.stderr


def test_where_hosts_do_not_meet_the_error_names_the_variable_within_seconds():
    done = run("--", "-c", HOST_GROUP, "by itself")
    assert "dedicate_params: mesh: expected ranks that reach each other by gloo" in done.stdout, done.stderr
    assert "Set GLOO_SOCKET_IFNAME on every host" in done.stdout


def test_a_failure_is_passed_on_and_ends_the_other_ranks():
    done = run("--", "-c", WAITING, "fail")
    assert done.returncode == 9
    assert "rank 3 has had enough" in done.stderr
    namespaces = done.stdout.split()
    assert len(namespaces) == 2
    assert members(namespaces) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(number):
    run("--", "-c", "pass")  # skips where it cannot run
    with subprocess.Popen([*TOOL, "--", "-c", WAITING, "wait"], stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        namespaces = tool.stdout.readline().split()
        assert len(members(namespaces)) >= 2
        tool.send_signal(number)
        assert tool.wait(END_S) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + END_S  # killed, the tool cannot wait for the others
    while number == signal.SIGKILL and members(namespaces) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(namespaces) == []


def test_where_it_cannot_run_it_says_so_in_one_line(tmp_path):
    if shutil.which("unshare", path="/usr/sbin:/sbin"):  # the tool looks there too; on Debian it is in /usr/bin
        pytest.skip("unshare lies where it cannot be hidden")
    done = subprocess.run(
        [sys.executable, TOOL[0], "--", "-c", "pass"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 77
    assert done.stderr.startswith("cluster: skipped: no program ")
    assert done.stderr.count("\n") == 1


def test_two_runs_at_once_do_not_meet():
    run("--", "-c", "pass")
    check = "import os, socket; print(len(socket.if_nameindex()))"  # lo and eth0
    runs = [subprocess.Popen([*TOOL, "--", "-c", check], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(one.communicate(timeout=RUN_S)[0], one.returncode) for one in runs] == [("2\n", 0)] * 2
