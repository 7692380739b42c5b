"""Every fenced block of the pages runs in a test, is a command that exists, or says why nothing runs it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from dmuon._command.arguments import parser
from page_blocks import PROGRAMS, README, ROOT, TOGETHER, Block, blocks_of, pages, text_of

RUN_S = 600  # a limit for hangs: a program takes 5 s on an idle machine
ALL = [(page, block) for page in pages() for block in blocks_of(page)]


def of_language(*languages: str) -> list[tuple[str, Block]]:
    return [(page, block) for page, block in ALL if block.language in languages]


def commands(page: str) -> list[str]:
    """The lines of a page's blocks of commands, fenced or indented, without comments and prompts."""
    fenced = "".join(block.source for block in blocks_of(page, "sh"))
    indented = "\n".join(re.findall(r"^ {4}((?:make|dmuon|torchrun|python) .*)$", text_of(page), re.MULTILINE))
    lines = (fenced + indented).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip()]


def test_blocks_are_of_languages_that_something_checks():
    assert {block.language for _, block in ALL} == {"python", "sh", "diff"}


def test_blocks_of_python_run_or_say_why_not():
    runs = {*TOGETHER, *PROGRAMS, README}
    assert runs <= set(pages())
    for page, block in of_language("python"):
        assert (page in runs) != bool(block.not_run), f"{page}:{block.line}: <!-- not run: reason -->, or a test"


def test_readmes_first_block_is_the_program_that_other_tests_run():
    program = subprocess.run([ROOT / "tools" / "readme_program"], capture_output=True, text=True, check=True).stdout
    assert program == blocks_of(README, "python")[0].source


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_blocks_of_a_page_are_a_program(page, tmp_path):
    blocks = blocks_of(page, "python")
    assert blocks
    program = tmp_path / "program.py"
    program.write_text("\n\n".join(block.source for block in blocks))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_changes_of_programs_are_lines_of_a_diff():
    for page, block in of_language("diff"):
        for number, line in enumerate(block.source.splitlines(), block.line + 1):
            assert line[:1] in ("+", "-", " ", "", "."), f"{page}:{number}: {line}"
        assert re.search(r"^\+", block.source, re.MULTILINE), f"{page}:{block.line}"


@pytest.mark.parametrize("page", [page for page in pages() if commands(page)])
def test_commands_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    for command in commands(page):
        program, *words = shlex.split(command)
        if program == "make":
            assert {word for word in words if "=" not in word} <= targets, command
        elif program == "dmuon":
            parser().parse_args(words)
        elif program in ("torchrun", "python"):
            named = [word for word in words if re.match(r"(examples|bench|tests)/.*\.py$", word)]
            assert all((ROOT / path).is_file() for path in named), command


def test_commands_are_found_in_fences_and_indented():
    assert "make demo" in commands(README)
    assert any(command.startswith("dmuon plan --model qwen2.5-7b") for command in commands(README))
