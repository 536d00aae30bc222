"""MkDocs hook: build the site from README.md and all other pages at their repository paths.

MkDocs reads pages from one folder. This hook adds the Markdown pages of the whole repository, the
chapter, and each file that these pages link to. A relative link has the same target on the site and
in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "docs/*.ipynb", "*/README.md")
_LINK = re.compile(r"\]\(([^)#\s:]+)")


@event_priority(100)  # before plugins select files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of ``docs/`` by pages of the repository; keep the theme's files."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = {path.relative_to(ROOT).as_posix() for glob in PAGES for path in ROOT.glob(glob)}
    linked = {name for page in pages for name in _linked_files(page)}
    ours = [
        File(name, str(ROOT), config.site_dir, config.use_directory_urls)
        for name in sorted(pages | linked)
    ]
    return Files([*theme, *ours])


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Make links in the chapter lead to pages of the site. MkDocs converts Markdown links only."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'href="([\w-]+)\.md(#[\w-]*)?"', r'href="../\1/\2"', html)


def _linked_files(page: str) -> list[str]:
    """Return the existing files of the repository that a page links to."""
    folder = posixpath.dirname(page)
    links = _LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    names = [posixpath.normpath(posixpath.join(folder, link)) for link in links]
    return [name for name in names if not name.startswith("..") and (ROOT / name).is_file()]
