"""A hook of MkDocs: pages stay at their places in the repository, so that links between them work there and here.

Links to other files of the repository, such as sources, lead to its address (`repo_url`). Without an address the site
has copies of these files. Pictures are always copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PICTURES = {".svg", ".png"}
_LINK = re.compile(r"(?<=\]\()(?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?(?=\))")


def pages_of(nav: Any) -> Iterator[str]:
    """Yields the path of each page in a navigation, which nests lists and dicts."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)


def target_of(page: str, path: str) -> str:
    """Returns the path in the repository that `path` on a page means."""
    return os.path.normpath(Path(page).parent / path)


def linked_files(page: str, markdown: str) -> set[str]:
    """Returns the paths of the repository's files that a page has links to."""
    targets = {target_of(page, link["path"]) for link in _LINK.finditer(markdown)}
    return {target for target in targets if (ROOT / target).is_file()}


def with_source_links(page: str, markdown: str, pages: set[str], repository: str) -> str:
    """Returns the text of a page, with links to the repository for files that are neither pages nor pictures.

    Args:
        page: the page's path in the repository.
        markdown: its text.
        pages: the paths of all pages.
        repository: the repository's address, without a slash at its end.
    """

    def moved(link: re.Match[str]) -> str:
        target = target_of(page, link["path"])
        if target in pages or Path(target).suffix in PICTURES or not (ROOT / target).is_file():
            return link[0]
        return f"{repository}/blob/main/{target}{link['anchor'] or ''}"

    return _LINK.sub(moved, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of `docs_dir` by the pages of the navigation and the files that they need."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)

    def add(path: str) -> None:
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))

    for path in [*pages_of(config.nav), *map(str, config.extra_css)]:
        if (ROOT / path).is_file():
            add(path)
    needed: set[str] = set()
    for page in files.documentation_pages():
        if page.generated_by or (ROOT / page.src_uri).is_file():
            needed |= linked_files(page.src_uri, page.content_string)
    for path in sorted(needed - set(files.src_uris)):
        if not config.repo_url or Path(path).suffix in PICTURES:
            add(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links to sources lead to the repository, if its address is known."""
    if not config.repo_url:
        return markdown
    pages = {file.src_uri for file in files.documentation_pages()}
    return with_source_links(page.file.src_uri, markdown, pages, config.repo_url.rstrip("/"))
