"""The hooks of the site: links to sources, the page of headers, and pages that look alike here and on a code host."""

from __future__ import annotations

import re

import pytest
from page_blocks import ROOT, pages, text_of

pytest.importorskip("mkdocs", reason="the tools of the site need Python 3.11")

import headers
import pages as pages_hook


def test_every_page_of_the_docs_is_in_the_navigation():
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert written <= set(pages())


@pytest.mark.parametrize("page", pages())
def test_lists_begin_after_an_empty_line(page):
    """A code host shows a list without one too, but the site a paragraph."""
    text = re.sub(r"^ *```.*?^ *```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?![-*] |\d+\. | |#|$|<!--).*\n(?:[-*]|\d+\.) .*", text, re.MULTILINE)


def with_links(markdown: str) -> str:
    return pages_hook.with_source_links("docs/plans.md", markdown, {"docs/plans.md", "README.md"}, "https://host/dmuon")


def test_links_to_sources_lead_to_the_repository():
    assert with_links("[a](../Makefile), [b](../tools/lint#x)") == (
        "[a](https://host/dmuon/blob/main/Makefile), [b](https://host/dmuon/blob/main/tools/lint#x)"
    )


@pytest.mark.parametrize(
    "link", ["../README.md#more", "plans.md", "step_time.svg", "#anchor", "https://x.org/Makefile", "../no_such_file"]
)
def test_other_links_stay(link):
    assert with_links(f"[text]({link})") == f"[text]({link})"


def test_pages_are_found_at_any_depth_of_the_navigation():
    assert list(pages_hook.pages_of(["a.md", {"B": "b.md"}, {"C": ["c.md", {"D": "d.md"}]}])) == [
        "a.md",
        "b.md",
        "c.md",
        "d.md",
    ]


def test_a_page_needs_the_files_that_it_links_to():
    text = "[a](../Makefile) ![b](step_time.svg) [c](../src) [d](../no_such_file) [e](https://x.org)"
    assert pages_hook.linked_files("docs/plans.md", text) == {"Makefile", "docs/step_time.svg"}


HEADER = """#pragma once

/// A part. Not the main thing.
struct Part {
};

/// Moves things:
///
///   Lane lane;
///
/// @throws never.
template <typename T>
class BigLane final {
  /// Inside.
  void move();
};
"""


def test_a_header_is_for_what_has_its_name_else_for_the_first():
    assert headers.main_declaration(HEADER, "big_lane") == headers.Declaration("BigLane", "Moves things")
    assert headers.main_declaration(HEADER, "other") == headers.Declaration("Part", "A part.")


def test_a_comment_before_an_empty_line_is_the_headers():
    assert headers.main_declaration("/// All of it. More.\n\n" + HEADER, "x") == headers.Declaration("", "All of it.")


def test_a_function_and_a_constant_have_names():
    function = headers.main_declaration("/// Adds.\nstd::vector<int> add(int a,\n        int b);\n", "x")
    assert function == headers.Declaration("add", "Adds.")
    assert headers.main_declaration("/// Most.\ninline constexpr int kMost = 4;\n", "x").name == "kMost"


def test_a_header_without_a_comment_raises():
    with pytest.raises(ValueError, match=r"x\.h: expected a declaration"):
        headers.main_declaration("#pragma once\nstruct A {};\n", "x")


@pytest.fixture
def tree(tmp_path):
    for name, text in {
        "docs/architecture.md": "- **high** does this.\n- **low** does that.\n",
        "src/dmuon/low/shared.h": "/// Shared.\nstruct Shared {};\n",
        "src/dmuon/low/own.h": "/// Own.\nstruct Own {};\n",
        "src/dmuon/low/low.cpp": '#include "dmuon/low/own.h"\n',
        "src/dmuon/high/high.cpp": '#include "dmuon/low/shared.h"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_seams_are_the_headers_of_other_modules(tree):
    assert headers.seams(tree) == {"low": ["low/shared.h"]}
    assert "| [shared.h](../src/dmuon/low/shared.h) | `Shared` | Shared. |" in headers.page(tree)


def test_a_module_that_the_architecture_lacks_raises(tree):
    (tree / "docs" / "architecture.md").write_text("- **high** does this.\n")
    with pytest.raises(ValueError, match="shared"):
        headers.seams(tree)


def test_the_page_has_every_module_that_others_use():
    page = headers.page()
    assert "## core" in page and "[lane.h]" not in page  # no other module includes lane.h
    assert all(len(line.split(" | ")) == 3 for line in page.splitlines() if line.startswith("| ["))
