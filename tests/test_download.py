"""How Fashion-MNIST is downloaded, and what a download that goes wrong leaves behind: nothing."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import textwrap
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from training import write_idx_set

from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.train import data as data_module
from pyringar.train import download
from pyringar.train.data import load_data
from pyringar.train.download import download_fashion_mnist

NAMES = [
    f"{half}-{kind}-ubyte" for half in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]
# What pyringar uses of torchvision, with a mirror in a folder.
FAKE_TORCHVISION = """
import hashlib, shutil, sys, types
from pathlib import Path

class FashionMNIST:
    mirrors = ["{mirror}/"]
    resources = {resources}

def download_url(url, root, md5):
    target = Path(root, Path(url).name)
    shutil.copy(url, target)
    if hashlib.md5(target.read_bytes()).hexdigest() != md5:
        raise RuntimeError("File not found or corrupted.")

utils = types.ModuleType(__name__ + ".utils")
utils.download_url = download_url
sys.modules[utils.__name__] = utils
"""


def is_torchvision(name: str) -> bool:
    return name.partition(".")[0] == "torchvision"


@pytest.fixture
def torchvision_is(monkeypatch, tmp_path):
    """Put a package with the given source in the place of torchvision."""

    def replace(source):
        package = tmp_path / "site" / "torchvision" / "datasets"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(textwrap.dedent(source))
        for name in filter(is_torchvision, list(sys.modules)):
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(package.parent.parent)

    yield replace
    for name in filter(is_torchvision, list(sys.modules)):
        del sys.modules[name]


@pytest.fixture
def mirror(tmp_path):
    """Fashion-MNIST's four archives, of a few images."""
    return write_idx_set(tmp_path / "mirror", 7, 3, ".gz")


def resources(mirror: Path) -> list[tuple[str, str]]:
    archives = [mirror / f"{name}.gz" for name in NAMES]
    return [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in archives]


@pytest.fixture
def reachable(monkeypatch, torchvision_is, mirror):
    """A mirror that can be reached."""
    monkeypatch.setattr(download, "_why_unreachable", lambda *_: None)
    torchvision_is(FAKE_TORCHVISION.format(mirror=mirror, resources=resources(mirror)))


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.usefixtures("reachable")
def test_images_are_downloaded_once_and_where_they_were_wanted(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "not" / "yet"
    assert load_data("auto", folder).train_labels.tolist() == list(range(7))
    assert "downloading Fashion-MNIST (30 MB)" in caplog.text
    raw = [f"FashionMNIST/raw/{name}" for name in sorted(NAMES)]
    assert tree(folder) == ["FashionMNIST", "FashionMNIST/raw", *raw]
    assert socket.getdefaulttimeout() is None
    monkeypatch.setattr(data_module, "download_fashion_mnist", None)
    assert load_data("fashion-mnist", folder).test_labels.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("reachable")
def test_what_killed_downloads_left_is_removed_and_what_others_use_is_not(tmp_path):
    parent = tmp_path / "FashionMNIST"
    for name in ("killed", "used", "new"):
        (parent / f".download-{name}" / "unpacked").mkdir(parents=True)
        if name != "new":
            os.utime(parent / f".download-{name}", (0, 0))
    with download._locked(parent / ".download-used"):
        load_data("fashion-mnist", tmp_path)
    assert sorted(os.listdir(parent)) == [".download-new", ".download-used", "raw"]


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize("broken", range(4))
@pytest.mark.parametrize("how", ["another", "cut short", "gone"])
def test_a_broken_download_leaves_nothing_behind(tmp_path, mirror, broken, how):
    archive = mirror / f"{NAMES[broken]}.gz"
    content = archive.read_bytes()
    if how == "gone":
        archive.unlink()
    else:
        archive.write_bytes(content[:-1] if how == "cut short" else content[:-1] + b"!")
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"^data_dir is .* and Fashion-MNIST cannot be dow"):
            load_data("auto", tmp_path / "images")
        assert tree(tmp_path / "images") == ["FashionMNIST"]
    archive.write_bytes(content)
    assert len(load_data("auto", tmp_path / "images").train_labels) == 7


@pytest.mark.usefixtures("reachable")
def test_an_interrupted_download_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(download.shutil, "copyfileobj", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_data("auto", tmp_path / "images")
    assert tree(tmp_path / "images") == ["FashionMNIST"]
    assert socket.getdefaulttimeout() is None


@pytest.mark.usefixtures("reachable")
def test_what_a_killed_download_left_is_not_taken_for_images(tmp_path, mirror):
    left = tmp_path / "images" / "FashionMNIST" / ".download-killed" / "unpacked"
    write_idx_set(left, 5, 5)
    assert len(load_data("auto", tmp_path / "images").train_labels) == 7


@pytest.mark.usefixtures("reachable")
def test_two_at_once_both_find_the_images(tmp_path, monkeypatch):
    """Both download; the second finds the first's files in place and takes them."""
    folder = tmp_path / "images" / "FashionMNIST" / "raw"
    put_in_place, calls = download._put_in_place, []

    def other_first(unpacked, target):
        calls.append(unpacked)
        if len(calls) == 1:
            download_fashion_mnist(folder)
        put_in_place(unpacked, target)

    monkeypatch.setattr(download, "_put_in_place", other_first)
    download_fashion_mnist(folder)
    assert len(calls) == 2
    assert tree(folder.parent) == ["raw", *(f"raw/{name}" for name in sorted(NAMES))]


@pytest.mark.usefixtures("reachable")
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "FashionMNIST/raw").mkdir(parents=True)
    (tmp_path / "FashionMNIST/raw/notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=r"FashionMNIST/raw' failed .OSError: .*not empty"):
        load_data("auto", tmp_path)
    assert tree(tmp_path / "FashionMNIST") == ["raw", "raw/notes.txt"]


@pytest.mark.usefixtures("reachable")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"into '.*file/FashionMNIST/raw' failed \(NotADir"):
        load_data("fashion-mnist", tmp_path / "file")


def test_without_network_the_mirror_is_named(torchvision_is, mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_why_unreachable", lambda *_: "no network")
    torchvision_is(FAKE_TORCHVISION.format(mirror=mirror, resources=resources(mirror)))
    with pytest.raises(RingarError, match=r"mirror/ cannot be reached \(no network\)"):
        download_fashion_mnist(tmp_path / "images")
    assert not (tmp_path / "images").exists()


def test_torchvision_itself_downloads_and_verifies(mirror, tmp_path, monkeypatch, capsys):
    try:
        from torchvision.datasets import FashionMNIST
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    monkeypatch.setenv("no_proxy", "*")
    handler = partial(SimpleHTTPRequestHandler, directory=str(mirror))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(FashionMNIST, "resources", resources(mirror))
        assert len(load_data("auto", tmp_path / "images").train_labels) == 7
        assert "100%" in capsys.readouterr().err, "no bar"
        wrong = [(name, "0" * 32) for name, _ in resources(mirror)]
        monkeypatch.setattr(FashionMNIST, "resources", wrong)
        with pytest.raises(ArgumentError, match="RuntimeError: File not found or corrupted"):
            load_data("auto", tmp_path / "others")
        server.shutdown()
    assert tree(tmp_path / "others") == ["FashionMNIST"]


@pytest.mark.parametrize(
    ("error", "words", "message"),
    [
        ("ModuleNotFoundError", "No module named torchvision", "`pip install torchvision`"),
        ("RuntimeError", "operator nms does not exist", r"built for another torch"),
        pytest.param(
            *("OSError", "libcudart.so.99: cannot open", r"built for another torch"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("ImportError", "undefined symbol", "--force-reinstall torch=="),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_torchvision_that_cannot_be_imported_is_explained(
    torchvision_is, tmp_path, caplog, monkeypatch, error, words, message
):
    torchvision_is(f"raise {error}({words!r})")
    with pytest.raises(UnsupportedError, match=rf"{words}\).*{message}"):
        download_fashion_mnist(tmp_path / "images")
    monkeypatch.setattr(data_module, "default_data_dir", lambda: tmp_path)
    assert load_data("auto").name == "synthetic garments"
    assert "torchvision, which downloads it, cannot be imported" in caplog.text


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("2.13.0", "torch==2.13.0 torchvision"),
        (
            "2.13.0+cpu",
            "torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cpu",
        ),
        ("2.15.1+cu130", "torchvision --index-url https://download.pytorch.org/whl/cu130"),
        ("2.14.0a0+git1234", "torch==2.14.0a0 torchvision"),
    ],
)
def test_the_advice_fits_the_torch_that_is_installed(monkeypatch, version, command):
    monkeypatch.setattr(torch, "__version__", version)
    assert download._install_command().endswith(command)


class TestReachable:
    def test_a_server_that_answers(self):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(200 if self.path == "/there" else 404)
                self.end_headers()

            def log_message(self, *_):
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}"
            assert download._why_unreachable(url + "/there", 5.0) is None
            assert "404" in download._why_unreachable(url + "/gone", 5.0)
            server.shutdown()

    def test_no_thread_is_a_reason(self, monkeypatch):
        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        assert "can't start new thread" in download._why_unreachable("http://x/", 1.0)

    @pytest.mark.parametrize("how", ["refused", "silent", "lookup"])
    def test_one_that_does_not_is_given_up_in_time(self, how, monkeypatch):
        released = threading.Event()

        def stuck(*_, **__):
            released.wait(60)
            raise OSError("gave up")

        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            if how == "silent":
                server.listen()
            if how == "lookup":
                monkeypatch.setattr(socket, "getaddrinfo", stuck)
            monkeypatch.setenv("no_proxy", "*")
            started = time.monotonic()
            url = f"http://127.0.0.1:{server.getsockname()[1]}/"
            reason = download._why_unreachable(url, 0.5)
            seconds = time.monotonic() - started
            released.set()
        assert reason
        assert seconds < 3
