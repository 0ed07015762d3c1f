"""Hooks of the site's build: README is its first page, and links that leave docs/ lead into the repository.

The pages are read on GitHub as well, so their links go by files: `../../examples/x.py`. On the site what is not in
docs/ has an address only if the repository's is known, and is plain text otherwise.
"""

import posixpath
import re
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

#: A link or an image: its mark, its words, its target, and the heading in it.
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE: Final = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_README: Final = "README.md"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds README as the first page. Its links are as from a file in docs/."""
    root = posixpath.dirname(config.docs_dir)
    with open(posixpath.join(root, _README), encoding="utf-8") as file:  # noqa: PTH123 - mkdocs has paths as texts
        files.append(File.generated(config, "index.md", content=_relocated(file.read(), "", "docs")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    return _outside(markdown, page.file.src_uri, config.repo_url or "")


def _relocated(text: str, source: str, to: str) -> str:
    """Links of a page in folder `source` of the repository, as they are in the folder `to`."""

    def link(found: re.Match[str]) -> str:
        mark, words, target, heading = found.groups(default="")
        path = posixpath.relpath(posixpath.join(source, target), to)
        return f"{mark}[{words}]({path}{heading})"

    return _in_prose(text, link)


def _outside(text: str, page: str, repository: str) -> str:
    """Replaces links of a page of docs/ that lead out of it, and those to folders, which have no page."""

    def link(found: re.Match[str]) -> str:
        mark, words, target, heading = found.groups(default="")
        folder = posixpath.join("docs", posixpath.dirname(page))
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == _README:
            return f"[{words}]({posixpath.relpath('docs/index.md', folder)}{heading})"
        if path.startswith("docs/") and not target.endswith("/"):
            return found[0]
        return f"{mark}[{words}]({repository}/blob/main/{path}{heading})" if repository else words

    return _in_prose(text, link)


def _in_prose(text: str, link: Any) -> str:
    """Replaces links outside code."""
    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
