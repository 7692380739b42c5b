"""A hook of MkDocs: writes the page of the C++ headers that modules share, from the headers themselves."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGE = "docs/headers.md"
_HEAD = """# C++ headers

The headers that another module of `src/dmuon` includes, by module: the seams between modules. Each row names what a
header is for, or what it declares first, and shows the first sentence of that comment. The header has the whole
contract. [Architecture](architecture.md#modules) says what a module is for.
"""
_INCLUDE = re.compile(r'^#include "dmuon/(\S+\.h)"', re.MULTILINE)
_COMMENT = re.compile(r"^(?P<text>(?:///(?: .*)?\n)+)(?=(?P<code>(?:.*\n){1,3}))", re.MULTILINE)
_NAME = re.compile(r"(?:class|struct|using|enum class)\s+(?P<type>\w+)|(?P<other>\w+)\s*(?:\(|=|;|\{)")
_MODULE = re.compile(r"^- \*\*(\w+)\*\* ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A name that a header declares in its namespace, and the first sentence of its comment."""

    name: str  # empty: the comment is about the whole header
    sentence: str


def seams(root: Path = ROOT) -> dict[str, list[str]]:
    """Returns the headers that a file of another module includes, by module, below src/dmuon."""
    source, found = root / "src" / "dmuon", set()
    for path in source.rglob("*"):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            module = path.relative_to(source).parts[0]
            found |= {name for name in _INCLUDE.findall(path.read_text()) if name.split("/")[0] != module}
    architecture = (root / "docs" / "architecture.md").read_text()
    modules = [name for name in _MODULE.findall(architecture) if (source / name).is_dir()]
    by_module = {module: sorted(name for name in found if name.split("/")[0] == module) for module in modules}
    if lost := found - {name for names in by_module.values() for name in names}:
        raise ValueError(f"docs/architecture.md: Modules: expected the modules of all headers, lacks {sorted(lost)}")
    return {module: names for module, names in by_module.items() if names}


def first_sentence(comment: str) -> str:
    """Returns the first sentence of lines that begin with ///, in one line."""
    paragraph = re.split(r"^///$|^/// @", comment, flags=re.MULTILINE)[0]
    words = " ".join(line.removeprefix("///").strip() for line in paragraph.splitlines())
    return re.split(r"(?<=\.)\s", words)[0].removesuffix(":")


def main_declaration(header: str, name: str) -> Declaration:
    """Returns what a header is for: the declaration of the header's name, else the first one that has a comment.

    Args:
        header: the text of the header.
        name: the header's name without its ending, such as "step_schedule".
    """
    found = []
    for block in _COMMENT.finditer(header):
        if block["code"].startswith("\n"):
            found.append(Declaration("", first_sentence(block["text"])))
            continue
        declared = _NAME.search(re.sub(r"^template <.*>$", "", block["code"], flags=re.MULTILINE))
        if declared is not None:
            found.append(Declaration(declared["type"] or declared["other"], first_sentence(block["text"])))
    if not found:
        raise ValueError(f"{name}.h: expected a declaration with a comment that begins with ///")
    plain = name.replace("_", "")
    return next((one for one in found if one.name.replace("_", "").lower() == plain), found[0])


def page(root: Path = ROOT) -> str:
    """Returns the text of the page."""
    lines = [_HEAD]
    for module, names in seams(root).items():
        lines += [f"## {module}", "", "| header | declares | |", "| --- | --- | --- |"]
        for name in names:
            found = main_declaration((root / "src" / "dmuon" / name).read_text(), Path(name).stem)
            sentence = found.sentence.replace("|", "\\|")
            declared = f"`{found.name}`" if found.name else ""
            lines.append(f"| [{name.split('/', 1)[1]}](../src/dmuon/{name}) | {declared} | {sentence} |")
        lines.append("")
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    files.append(File.generated(config, PAGE, content=page()))
    return files
