"""The pages of the site, their fenced blocks, and how these run."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = "README.md"  # its first block is a program that tools/check_install runs
# The blocks of these pages run one after the other, then README's others, on 2 x 2 ranks (test_training_page.py).
TOGETHER = (
    "docs/training.md",
    "docs/rules.md",
    "docs/matrices.md",
    "docs/parallelism.md",
    "docs/checkpoints.md",
    "docs/qk_clip.md",
)
# The blocks of each page are one program of one process (tests/docs).
PROGRAMS = ("docs/from/torch.md", "docs/from/dion.md", "docs/from/xsquare.md")
_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+) -->\n)?(?P<indent> *)```(?P<language>.*)\n(?P<source>(?:.*\n)*?)(?P=indent)```$",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: the word after the fence, such as "python".
        source: its lines, without the indentation of the fence.
        line: the number of the fence's line, so of the line before the source.
        not_run: why nothing runs it, as `<!-- not run: reason -->` before the fence says; "" if it runs.
    """

    language: str
    source: str
    line: int
    not_run: str


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def pages() -> list[str]:
    """Paths of the site's pages that are files, as the navigation lists them."""
    nav = text_of("mkdocs.yml").split("\nnav:\n")[1].split("\n\n")[0]
    return [path for path in re.findall(r"\S+\.md$", nav, re.MULTILINE) if (ROOT / path).exists()]


def blocks_of(page: str, language: str | None = None) -> list[Block]:
    """The blocks of a page, of one language or of all."""
    text = text_of(page)
    found = [
        Block(
            block["language"],
            textwrap.dedent(block["source"]),
            text.count("\n", 0, block.start("language")) + 1,
            block["reason"] or "",
        )
        for block in _FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]
