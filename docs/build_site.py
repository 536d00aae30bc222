"""Write the documentation as a web site: ``python docs/build_site.py --out DIR``.

README, the pages of docs/, the chapter with its outputs, the API reference, and every page that
these link to. A link that leads nowhere is an error. Needs `pip install '.[docs]'`.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import markdown2
from pygments.formatters import HtmlFormatter

sys.path.append(str(Path(__file__).resolve().parent))

import build_api

import pyringar

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(__file__).with_name("site")
API = "api/pyringar.html"
# What the menu holds; pages that these link to stand under "More".
MENU = {
    "Start": ("README.md", "docs/tasks.md", "docs/wheels.md"),
    "How to": (
        *("docs/replace-dataparallel.md", "docs/add-to-ddp.md", "docs/hand-written-loop.md"),
        *("docs/torchrun.md", "docs/cluster.md", "docs/grading.md", "docs/audit.md"),
        "examples/README.md",
    ),
    "Learn": ("docs/chapter.ipynb", "docs/algorithms.md", "docs/report.md"),
    "Change": (
        *("docs/architecture.md", "csrc/README.md", "docs/gpu.md", "docs/cuda-kernels.md"),
        *("tests/README.md", "CONTRIBUTING.md"),
    ),
}
_HIDDEN = ("docs/README.md",)  # the list of pages, which the menu is


@dataclass
class Page:
    """One page, by its path in the repository, with what its HTML links to and can be linked at."""

    source: str
    title: str
    body: str
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)


def build(out: Path, root: Path = ROOT, with_api: bool = True) -> list[Page]:
    """Write the site.

    Args:
        out: The folder; made if need be.
        root: The repository.
        with_api: Write the API reference, too.

    Returns:
        The pages, without those of the API reference.

    Raises:
        RuntimeError: Names every link that leads nowhere, or what pdoc warned of.
    """
    pages = _read_pages(root)
    files = check_links(pages, root)
    out.mkdir(parents=True, exist_ok=True)
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(SITE), autoescape=False, undefined=jinja2.StrictUndefined
    ).get_template("page.html.jinja2")
    menu = _menu(pages)
    for page in pages.values():
        path = out / address(page.source)
        path.parent.mkdir(parents=True, exist_ok=True)
        html = template.render(
            title=page.title if page.source == "README.md" else f"{page.title} - pyringar",
            root="../" * page.source.count("/"),
            here=address(page.source),
            nav=menu,
            body=_with_addresses(page, pages),
            source=page.source,
            version=pyringar.__version__,
        )
        path.write_text(html, encoding="utf-8")
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, out / name)
    colors = HtmlFormatter(style="default").get_style_defs([".codehilite", ".highlight"])
    style = (SITE / "style.css").read_text(encoding="utf-8")
    (out / "style.css").write_text(f"{style}\n{colors}\n", encoding="utf-8")
    if with_api:
        build_api.build(out / "api", home="../index.html")
    return list(pages.values())


def address(source: str) -> str:
    """Return where a page lies in the site: README.md of a folder is its index.html."""
    folder, name = posixpath.split(source)
    stem = "index" if name == "README.md" else posixpath.splitext(name)[0]
    return posixpath.join(folder, f"{stem}.html")


# -- pages -----------------------------------------------------------------------------------------


def _read_pages(root: Path) -> dict[str, Page]:
    """Return the pages of the menu that are there, and all pages that they link to."""
    wanted = [name for names in MENU.values() for name in names if (root / name).exists()]
    wanted += [f"docs/{path.name}" for path in sorted((root / "docs").glob("*.md"))]
    pages: dict[str, Page] = {}
    while wanted:
        name = wanted.pop(0)
        if name in pages:
            continue
        pages[name] = _page(name, root)
        linked = (target for target, _ in _targets(pages[name]))
        wanted += [t for t in linked if t.endswith((".md", ".ipynb")) and (root / t).exists()]
    return pages


def _page(name: str, root: Path) -> Page:
    body = _chapter(root / name) if name.endswith(".ipynb") else _markdown(root / name)
    found = _Links()
    found.feed(body)
    return Page(name, found.title.rstrip("¶").strip() or name, body, found.links, found.anchors)


def _markdown(path: Path) -> str:
    extras = ["tables", "fenced-code-blocks", "header-ids", "cuddled-lists", "code-friendly"]
    html = str(_GitHubMarkdown(extras=extras).convert(path.read_text(encoding="utf-8")))
    html = re.sub(r"<!--.*?-->", "", html, flags=re.DOTALL)
    # A browser would break a line between -- and the name.
    flag = r"(?<=[ >])--[a-z][a-z-]*(?=[^<>]*</code>)"
    html = re.sub(flag, r'<span class="flag">\g<0></span>', html)
    return html.replace("<table>", '<div class="table"><table>').replace(
        "</table>", "</table></div>"
    )


def _chapter(path: Path) -> str:
    try:
        from nbconvert import HTMLExporter
    except ImportError as error:
        raise RuntimeError(
            f"{path.name} needs nbconvert ({error}): pip install '.[docs]'"
        ) from error
    body, _ = HTMLExporter(template_name="basic").from_filename(str(path))
    return str(body)


class _GitHubMarkdown(markdown2.Markdown):
    """Markdown whose headings have the anchors that GitHub gives them."""

    def header_id_from_text(self, text: str, prefix: str, n: int) -> str:
        del prefix, n
        words = re.sub(r"<[^>]+>", "", text)
        anchor = re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")
        self._count_from_header_id[anchor] += 1
        count = self._count_from_header_id[anchor] - 1
        return f"{anchor}-{count}" if count else anchor


class _Links(HTMLParser):
    """Collects a page's links, anchors and first heading."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.title = ""
        self._is_title = False

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        """Note what a tag links to and can be linked at."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)
        self._is_title = self._is_title or (tag == "h1" and not self.title)

    def handle_endtag(self, tag: str) -> None:
        """Note the end of the heading."""
        self._is_title = self._is_title and tag != "h1"

    def handle_data(self, data: str) -> None:
        """Note the heading's words."""
        if self._is_title:
            self.title += data


def _menu(pages: dict[str, Page]) -> list[tuple[str, list[tuple[str, str]]]]:
    listed = {name for names in MENU.values() for name in names}
    groups = {**MENU, "More": tuple(n for n in pages if n not in listed and n not in _HIDDEN)}
    menu = []
    for group, names in groups.items():
        links = [
            ("Overview" if name == "README.md" else pages[name].title, address(name))
            for name in names
            if name in pages
        ]
        if group == "Start":
            links.append(("API reference", API))
        if links:
            menu.append((group, links))
    return menu


# -- links -----------------------------------------------------------------------------------------


def _targets(page: Page) -> Iterator[tuple[str, str]]:
    """Yield the path in the repository and the anchor of every link that stays there."""
    for link in page.links:
        if not re.match(r"[a-z][a-z0-9+.-]*:|//", link):
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), path))
            yield (target if path else page.source), anchor


def check_links(pages: dict[str, Page], root: Path) -> set[str]:
    """Return the files beside the pages that these link to.

    Raises:
        RuntimeError: Names every link that leads nowhere.
    """
    files, broken = set(), []
    for page in pages.values():
        for target, anchor in _targets(page):
            if target in pages:
                if anchor and anchor not in pages[target].anchors:
                    broken.append(f"{page.source}: {target} has no heading #{anchor}")
            elif not target.startswith("..") and (root / target).is_file():
                files.add(target)
            else:
                broken.append(f"{page.source}: {target} is not there")
    if broken:
        raise RuntimeError("links that lead nowhere:\n" + "\n".join(broken))
    return files


def _with_addresses(page: Page, pages: dict[str, Page]) -> str:
    """Return a page's HTML with links to the other pages where those lie in the site."""

    def moved(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        folder = posixpath.dirname(page.source)
        target = posixpath.normpath(posixpath.join(folder, path))
        if not path or target not in pages:
            return match[0]
        return f'{match[1]}"{os.path.relpath(address(target), folder or ".")}{mark}{anchor}"'

    return re.sub(r'\b(href=)"([^":]+)"', moved, page.body)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    out: Any = parser.parse_args(argv).out
    if out.exists() and not out.is_dir():
        parser.error(f"--out is '{out}', which is a file, expected a folder")
    try:
        pages = build(out)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(pages)} pages and the API reference: {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
