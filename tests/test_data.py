"""Where images come from: real ones, downloaded ones, drawn ones, and the reasons in between."""

from __future__ import annotations

import socket
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.train import data as data_module
from pyringar.train.data import batches, default_data_dir, load_data
from pyringar.train.synthetic import CLASS_NAMES, synthetic_images

# What pyringar uses of torchvision.datasets.FashionMNIST, with files of a few images.
FAKE_TORCHVISION = """
from pathlib import Path
import torch

class FashionMNIST:
    mirrors = ["http://mirror.invalid/"]
    resources = [("train.gz", "md5"), ("test.gz", "md5")]

    def __init__(self, root, train=True, download=False):
        raw = Path(root) / "FashionMNIST" / "raw"
        if download:
            raw.mkdir(parents=True)
            for name, n in (("train", 7), ("test", 3)):
                torch.save((torch.full((n, 28, 28), 255, dtype=torch.uint8),
                            torch.arange(n)), raw / name)
        path = raw / ("train" if train else "test")
        if path.stat().st_size < 20:
            raise ValueError("invalid literal for int()")  # as torchvision for a cut file
        self.data, self.targets = torch.load(path)
"""


@pytest.fixture
def torchvision_is(monkeypatch, tmp_path):
    """Put a package with the given source in the place of torchvision."""

    def replace(source):
        package = tmp_path / "site" / "torchvision" / "datasets"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(textwrap.dedent(source))
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(package.parent.parent)

    yield replace
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setattr(data_module, "_why_unreachable", lambda *_: None)


@pytest.mark.usefixtures("reachable")
def test_images_are_downloaded_once_and_become_tensors(torchvision_is, tmp_path, monkeypatch):
    torchvision_is(FAKE_TORCHVISION)
    images = load_data("auto", tmp_path / "new")
    assert images.name == "Fashion-MNIST"
    assert images.train_images.shape == (7, 1, 28, 28)
    assert images.train_images.dtype == torch.float32
    assert images.train_images.unique().tolist() == [1.0]
    assert images.test_labels.tolist() == [0, 1, 2]
    assert socket.getdefaulttimeout() is None
    monkeypatch.setattr(data_module, "_download", None)
    assert load_data("fashion-mnist", tmp_path / "new").train_labels.tolist() == list(range(7))


def test_without_network_there_is_an_error_or_an_announced_substitute(
    torchvision_is, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(data_module, "_why_unreachable", lambda *_: "no network")
    torchvision_is(FAKE_TORCHVISION)
    with pytest.raises(RingarError, match=r"not in '.*' and http://mirror.invalid/ cannot .* \(no"):
        load_data("fashion-mnist", tmp_path)
    assert not caplog.records
    images = load_data("auto", tmp_path)
    assert images.name == "synthetic garments"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "NOT Fashion-MNIST" in record.getMessage()
    assert "no network" in record.getMessage()


@pytest.mark.usefixtures("reachable")
def test_a_folder_that_cannot_be_written_is_named(torchvision_is, tmp_path):
    torchvision_is(FAKE_TORCHVISION)
    (tmp_path / "file").touch()
    with pytest.raises(RingarError, match=r"not in '.*file' and downloading it failed"):
        load_data("fashion-mnist", tmp_path / "file")


def test_broken_files_are_named(torchvision_is, tmp_path):
    torchvision_is(FAKE_TORCHVISION)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train", "test"):
        (raw / name).write_bytes(b"not a tensor")
    with pytest.raises(ArgumentError, match=r"FashionMNIST/raw/train-\* cannot be read"):
        load_data("fashion-mnist", tmp_path)
    torch.save((torch.zeros(3, 32, 32), torch.zeros(3)), raw / "train")
    with pytest.raises(ArgumentError, match=r"images of shape \(3, 32, 32\)"):
        load_data("fashion-mnist", tmp_path)
    images, labels = torch.zeros(3, 28, 28), torch.tensor([0, 9, 255])
    torch.save((images, labels % 10), raw / "train")
    torch.save((images, labels), raw / "test")
    with pytest.raises(ArgumentError, match=r"raw/t10k-labels.* from 0 to 255, expected 0 to 9"):
        load_data("fashion-mnist", tmp_path)


@pytest.mark.parametrize(
    ("error", "words", "message"),
    [
        ("ModuleNotFoundError", "No module named torchvision", "`pip install torchvision`"),
        ("RuntimeError", "operator nms does not exist", r"built for another torch"),
        ("OSError", "libcudart.so.99: cannot open", r"built for another torch"),
        ("ImportError", "undefined symbol", "--force-reinstall torch=="),
    ],
)
def test_a_torchvision_that_cannot_be_imported_is_explained(
    torchvision_is, tmp_path, caplog, error, words, message
):
    torchvision_is(f"raise {error}({words!r})")
    with pytest.raises(UnsupportedError, match=rf"{words}\).*{message}"):
        load_data("fashion-mnist", tmp_path)
    assert load_data("auto", tmp_path).name == "synthetic garments"
    assert "torchvision cannot be imported" in caplog.text


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
    assert data_module._install_command().endswith(command)


def test_an_unknown_data_set_is_named():
    with pytest.raises(ArgumentError, match="dataset is 'cifar'"):
        load_data("cifar")
    assert default_data_dir().is_absolute()
    assert "pyringar" in default_data_dir().parts


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
            assert data_module._why_unreachable(url + "/there", 5.0) is None
            assert "404" in data_module._why_unreachable(url + "/gone", 5.0)
            server.shutdown()

    def test_no_thread_is_a_reason(self, monkeypatch):
        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        assert "can't start new thread" in data_module._why_unreachable("http://x/", 1.0)

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
            reason = data_module._why_unreachable(url, 0.5)
            seconds = time.monotonic() - started
            released.set()
        assert reason
        assert seconds < 3


def test_batches_cover_everything_once():
    images, labels = torch.arange(10.0).reshape(10, 1), torch.arange(10)
    in_order = list(batches(images, labels, 4))
    assert [len(y) for _, y in in_order] == [4, 4, 2]
    assert torch.cat([y for _, y in in_order]).tolist() == list(range(10))
    shuffled = list(batches(images, labels, 4, torch.Generator().manual_seed(0)))
    seen = torch.cat([y for _, y in shuffled])
    assert seen.tolist() != list(range(10))
    assert seen.sort().values.tolist() == list(range(10))
    assert torch.equal(torch.cat([x for x, _ in shuffled]).flatten(), seen.float())


class TestSynthetic:
    def test_shapes_ranges_and_balance(self):
        images, labels = synthetic_images(207, seed=0)
        assert images.shape == (207, 1, 28, 28)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        counts = labels.bincount()
        assert len(counts) == len(CLASS_NAMES) == 10
        assert counts.tolist() == [21] * 7 + [20] * 3
        assert (images >= 0).all()
        assert (images <= 1).all()
        steps = images * 255
        assert (steps - steps.round()).abs().max() < 1e-4
        assert (images.flatten(1).amax(1) > 0.1).all(), "an image is blank"
        assert not torch.equal(labels, labels.sort().values)

    def test_a_seed_gives_the_same_images_and_another_gives_others(self):
        first, second, other = (synthetic_images(500, seed) for seed in (3, 3, 4))
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert not torch.equal(first[0], other[0])
        assert len(first[0].flatten(1).unique(dim=0)) == 500, "two images are alike"

    def test_fewer_images_than_classes(self):
        assert synthetic_images(3, seed=0)[1].sort().values.tolist() == [0, 1, 2]
        with pytest.raises(ArgumentError, match="n is 0"):
            synthetic_images(0, seed=0)

    def test_the_halves_of_the_set_differ(self):
        images = load_data("synthetic")
        assert str(images) == "synthetic garments, 6,000 training and 1,000 test images"
        assert not torch.equal(images.train_images[:1000], images.test_images)

    def test_a_linear_model_falls_clearly_short(self):
        # LeNet reaches 0.85 on these images; here a linear model gets 500 full steps.
        images, labels = synthetic_images(1500, seed=1)
        test_images, test_labels = synthetic_images(400, seed=2)
        weight = torch.zeros(784, 10, requires_grad=True)
        for _ in range(500):
            loss = F.cross_entropy(images.flatten(1) @ weight, labels)
            (slope,) = torch.autograd.grad(loss, weight)
            weight.data -= 0.1 * slope
        answers = (test_images.flatten(1) @ weight).argmax(1)
        accuracy = (answers == test_labels).float().mean()
        assert 0.4 < accuracy < 0.75
