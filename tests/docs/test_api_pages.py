"""The reference has every name that dmuon exports, once, and each has a docstring."""

from __future__ import annotations

import inspect
import re

from page_blocks import pages, text_of

import dmuon

REFERENCE = "\n".join(text_of(page) for page in pages() if page.startswith("docs/api/"))
IN_VIEWS = {"View"}  # on the page of dmuon.views


def test_every_exported_name_has_its_entry():
    entries = re.findall(r"^::: dmuon\.(\w+)$", REFERENCE, re.MULTILINE)
    assert sorted(entries) == sorted(set(dmuon.__all__) - IN_VIEWS - {"__version__"})
    assert all(name in vars(dmuon.views) for name in IN_VIEWS)
    assert "\n## `dmuon.__version__`\n" in REFERENCE


def test_every_entry_has_a_docstring():
    for name in set(dmuon.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(dmuon, name)), name


def test_every_view_has_a_docstring():
    own = [value for value in vars(dmuon.views).values() if getattr(value, "__module__", "") == "dmuon.views"]
    public = [value for value in own if not value.__name__.startswith("_")]
    assert len(public) > 8
    assert all(inspect.getdoc(value) for value in public)
