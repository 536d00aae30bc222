"""Is the documentation one web site: every page in it, every link right, and mistakes named?"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/build_site.py")
assert _spec is not None
assert _spec.loader is not None
build_site = importlib.util.module_from_spec(_spec)
sys.modules["build_site"] = build_site  # dataclasses look there
_spec.loader.exec_module(build_site)

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8"
    "z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages but the API reference, which tests/test_api_reference.py builds."""
    pytest.importorskip("nbconvert")
    out = tmp_path_factory.mktemp("site")
    build_site.build(out, with_api=False)
    return out


def links_of(page: Path) -> list[str]:
    found = build_site._Links()
    found.feed(page.read_text())
    return [link for link in found.links if not re.match(r"[a-z]+:", link)]


def anchors_of(page: Path) -> set[str]:
    found = build_site._Links()
    found.feed(page.read_text())
    return found.anchors


def test_every_page_is_there(site: Path) -> None:
    written = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    expected = {f"docs/{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    expected = expected - {"docs/README.html"} | {"docs/index.html", "docs/chapter.html"}
    assert expected | {"index.html", "csrc/index.html", "CONTRIBUTING.html"} <= written


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    """As a browser follows them, apart from what build_site checks before it writes."""
    count = 0
    for page in site.rglob("*.html"):
        for link in links_of(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if "api/" in path:
                assert path.endswith("api/pyringar.html")
                continue
            assert target.is_file(), f"{page.name}: {link}"
            if anchor:
                assert anchor in anchors_of(target), f"{page.name}: {link}"
            assert not path.endswith((".md", ".ipynb")), f"{page.name}: {link}"
            count += 1
    assert count > 200


def test_pages_fit_a_phone_and_name_their_source(site: Path) -> None:
    style = (site / "style.css").read_text()
    assert "@media (max-width" in style
    assert ".codehilite" in style
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'name="viewport" content="width=device-width' in text
        assert text.count("<table") == text.count('<div class="table"><table'), "wide ones scroll"
        assert len(re.findall(r"<h1\b", text)) >= 1
        assert "<!-- not run" not in text
        assert re.search(r"Made from <code>[\w/.-]+</code>", text)


def test_the_menu_marks_the_page_that_is_open(site: Path) -> None:
    text = (site / "docs/tasks.html").read_text()
    (current,) = re.findall(r'<a href="([^"]+)" aria-current', text)
    assert current == "../docs/tasks.html"


def test_code_is_highlighted_and_flags_are_not_broken(site: Path) -> None:
    text = (site / "docs/tasks.html").read_text()
    assert '<span class="flag">--ranks</span> 4' in text
    assert "class=&quot;flag" not in text
    assert '<div class="codehilite">' in (site / "index.html").read_text()


# -- a small repository ----------------------------------------------------------------------------


def repository(folder: Path, **pages: str) -> Path:
    """One with a README, an empty chapter, and pages of docs/ by their stem."""
    (folder / "docs").mkdir(parents=True)
    (folder / "README.md").write_text(pages.pop("readme", "# Home\n"))
    for stem, text in pages.items():
        (folder / f"docs/{stem}.md").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x](b.md)", "docs/a.md: docs/b.md is not there"),
        ("[x](../README.md#no-such)", "docs/a.md: README.md has no heading #no-such"),
        ("[x](#no-such)", "docs/a.md: docs/a.md has no heading #no-such"),
        ("![x](figures/no.png)", "docs/a.md: docs/figures/no.png is not there"),
        ("[x](../../../etc/passwd)", "docs/a.md: ../../etc/passwd is not there"),
        ("[x](../docs)", "docs/a.md: docs is not there"),
    ],
)
def test_a_broken_link_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    root = repository(tmp_path / "repository", a=f"# A\n\n{text}\n")
    with pytest.raises(RuntimeError, match=re.escape(message)):
        build_site.build(tmp_path / "out", root, with_api=False)
    assert not (tmp_path / "out").exists(), "nothing is written"


def test_headings_have_githubs_anchors(tmp_path: Path) -> None:
    links = "[x](#one-two--three) [y](#twice-1)"
    text = f"# A\n\n## One, two & `three`\n\n## Twice\n\n## Twice\n\n{links}\n"
    root = repository(tmp_path / "repository", a=text)
    build_site.build(tmp_path / "out", root, with_api=False)
    assert {"one-two--three", "twice", "twice-1"} <= anchors_of(tmp_path / "out/docs/a.html")


def test_links_between_folders_and_to_other_files(tmp_path: Path) -> None:
    root = repository(
        tmp_path / "repository",
        readme="# Home\n\n[a](docs/a.md) [script](script.py) [away](https://example.org/x.md)\n",
        a="# A\n\n[home](../README.md) [list](README.md)\n",
        README="# Pages\n\n[a](a.md)\n",
    )
    (root / "script.py").write_text("print(1)\n")
    out = tmp_path / "out"
    build_site.build(out, root, with_api=False)
    assert {"docs/a.html", "script.py"} <= set(links_of(out / "index.html"))
    assert "https://example.org/x.md" in (out / "index.html").read_text()
    assert {"../index.html", "index.html"} <= set(links_of(out / "docs/a.html"))
    assert (out / "script.py").read_text() == "print(1)\n"


def test_a_chapter_shows_its_outputs(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert")
    root = repository(tmp_path / "repository")
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["12.5 ms <b>\n"]},
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": PIXEL}},
    ]
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Chapter\n"]},
        {"cell_type": "code", "id": "b", "metadata": {}, "execution_count": 1, "source": ["f(1)"]},
    ]
    cells[1]["outputs"] = outputs
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (root / "docs/chapter.ipynb").write_text(json.dumps(notebook))
    pages = build_site.build(tmp_path / "out", root, with_api=False)
    assert "Chapter" in {page.title for page in pages}
    text = (tmp_path / "out/docs/chapter.html").read_text()
    assert "12.5 ms &lt;b&gt;" in text
    assert f"data:image/png;base64,{PIXEL}" in text


def test_without_nbconvert_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nbconvert", None)
    assert build_site.main(["--out", str(tmp_path / "out")]) == 1
    assert "pip install '.[docs]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_place_for_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        build_site.main(["--out", str(out)])
    assert f"--out is '{out}', which is a file, expected a folder" in capsys.readouterr().err
    assert out.read_text() == "mine"


@pytest.mark.slow
def test_the_command_writes_the_api_reference_beside_the_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build_site.main(["--out", str(tmp_path)]) == 0
    assert f"pages and the API reference: {tmp_path / 'index.html'}" in capsys.readouterr().out
    menu = links_of(tmp_path / "index.html")
    assert build_site.API in menu
    reference = tmp_path / build_site.API
    assert "../index.html" in links_of(reference)
    for link in links_of(reference):
        path, _, anchor = link.partition("#")
        target = reference.parent / path if path else reference
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_a_second_build_replaces_the_first(tmp_path: Path) -> None:
    root = repository(tmp_path / "repository", a="# A\n")
    for title in ("Old", "New"):
        (root / "docs/a.md").write_text(f"# {title}\n")
        build_site.build(tmp_path / "out", root, with_api=False)
    assert "New" in (tmp_path / "out/docs/a.html").read_text()
    shutil.rmtree(tmp_path / "out")
