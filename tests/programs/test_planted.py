"""The list of planted bugs is not stale."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import PLANTED
from planted_change import Planted

pytestmark = pytest.mark.every_case
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_what_a_planted_bug_replaces_occurs_once(bug: Planted):
    assert bug.occurrences(ROOT) == 1
    assert bug.old != bug.new


def test_planted_bugs_have_names_of_their_own():
    names = [bug.name for bug in PLANTED]
    assert len(set(names)) == len(names) >= 32


def test_a_planted_bug_is_gone_afterwards(tmp_path: Path):
    source = tmp_path / "source"
    source.write_text("a wait; a use;")
    bug = Planted("no_wait", "source", "a wait; ", "", "")
    with bug.in_copy(tmp_path):
        assert source.read_text() == "a use;"
    assert source.read_text() == "a wait; a use;"
    source.write_text("a use;")
    with pytest.raises(ValueError, match="got 0 times"), bug.in_copy(tmp_path):
        pass
