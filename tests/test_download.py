"""Does torchvision's download of Fashion-MNIST arrive whole, and leave nothing if it fails?"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from training import write_idx_set

from pyringar.errors import ArgumentError
from pyringar.train import data as data_module
from pyringar.train.data import load_data

NAMES = [
    f"{half}-{kind}-ubyte" for half in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder with the four archives of a few images, which torchvision downloads by HTTP."""
    try:
        from torchvision.datasets import FashionMNIST
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    folder = write_idx_set(tmp_path / "mirror", 7, 3, ".gz")
    archives = [folder / f"{name}.gz" for name in NAMES]
    digests = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in archives]
    monkeypatch.setenv("no_proxy", "*")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(FashionMNIST, "resources", digests)
        yield folder
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("mirror")
def test_images_are_downloaded_once(tmp_path, monkeypatch, caplog, capsys):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "not" / "yet"
    assert load_data("auto", folder).train_labels.tolist() == list(range(7))
    assert "downloading Fashion-MNIST (30 MB)" in caplog.text
    assert re.search(r"100(\.0)?%", capsys.readouterr().err)  # with and without tqdm
    assert {f"FashionMNIST/raw/{name}" for name in NAMES} <= set(tree(folder))
    assert not list(folder.glob(".download-*"))
    monkeypatch.setattr(data_module, "_download", None)
    assert load_data("fashion-mnist", folder).test_labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("broken", "how"), [(0, "another"), (1, "cut short"), (2, "gone"), (3, "another")]
)
def test_broken_download_leaves_nothing(tmp_path, mirror, broken, how):
    archive = mirror / f"{NAMES[broken]}.gz"
    content = archive.read_bytes()
    archive.write_bytes(content[:-1] if how == "cut short" else content[:-1] + b"!")
    if how == "gone":
        archive.unlink()
    with pytest.raises(ArgumentError, match=r"^data_dir is .* and Fashion-MNIST cannot be dow"):
        load_data("auto", tmp_path / "images")
    assert tree(tmp_path / "images") == []
    archive.write_bytes(content)
    assert len(load_data("auto", tmp_path / "images").train_labels) == 7


@pytest.mark.usefixtures("mirror")
def test_interrupted_download_leaves_nothing(tmp_path, monkeypatch):
    from torchvision.datasets import FashionMNIST

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FashionMNIST, "_load_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_data("auto", tmp_path / "images")
    assert tree(tmp_path / "images") == []


@pytest.mark.usefixtures("mirror")
def test_killed_download_is_not_taken_for_images(tmp_path):
    write_idx_set(tmp_path / "images" / ".download-killed" / "FashionMNIST" / "raw", 5, 5)
    assert len(load_data("auto", tmp_path / "images").train_labels) == 7


@pytest.mark.usefixtures("mirror")
def test_slower_of_two_downloads_takes_the_files(tmp_path, monkeypatch):
    from torchvision.datasets import FashionMNIST

    real = FashionMNIST.__init__

    def other_first(self, root, download):
        monkeypatch.setattr(FashionMNIST, "__init__", real)
        data_module._download(tmp_path / "images")
        real(self, root, download=download)

    monkeypatch.setattr(FashionMNIST, "__init__", other_first)
    assert len(load_data("auto", tmp_path / "images").train_labels) == 7


@pytest.mark.usefixtures("mirror")
def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "FashionMNIST/raw").mkdir(parents=True)
    (tmp_path / "FashionMNIST/raw/notes.txt").write_text("mine")
    for folder, words in ((tmp_path / "file", "file"), (tmp_path, "not empty")):
        with pytest.raises(ArgumentError, match=f"^data_dir is '{folder}'.*failed .*{words}"):
            load_data("fashion-mnist", folder)
    assert tree(tmp_path / "FashionMNIST") == ["raw", "raw/notes.txt"]


def test_unreachable_mirror_is_named(mirror, tmp_path, monkeypatch):
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:1/"])
    with pytest.raises(ArgumentError, match=r"download from http://127\.0\.0\.1:1/.*URLError"):
        load_data("fashion-mnist", tmp_path / "images")
    assert not (tmp_path / "images").exists()


@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError, OSError])
def test_missing_torchvision_is_explained(tmp_path, caplog, monkeypatch, error):
    class Broken:
        """Stands for a torchvision whose import fails."""

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torchvision":
                raise error("no nms")

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.setattr(data_module, "default_data_dir", lambda: tmp_path)
    assert load_data("auto").name == "synthetic garments"
    told = f"torchvision, which downloads it, cannot be imported ({error.__name__}: no nms)"
    assert f"{told}; install the one for torch" in caplog.text
