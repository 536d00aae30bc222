"""Test loading of image files, downloads and synthetic images."""

from __future__ import annotations

import gzip
import hashlib
import logging
import re
import struct
import sys
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from training_runs import write_idx_set

from pyringar.errors import ArgumentError, RingarError
from pyringar.train import data as data_module
from pyringar.train.data import batches, load_data
from pyringar.train.synthetic import synthetic_images

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Use an empty default folder, and let each download fail."""

    def fail(root):
        raise RingarError("no network")

    monkeypatch.setattr(data_module, "_download", fail)
    monkeypatch.setattr(data_module, "default_data_dir", lambda: tmp_path / "default")
    monkeypatch.setattr(data_module, "_SYNTHETIC_TRAIN", 60)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("layout", ["FashionMNIST/raw", "raw", "."])
def test_all_file_layouts_are_read(tmp_path, suffix, layout):
    write_idx_set(tmp_path / layout, 7, 3, suffix)
    images = load_data("auto", tmp_path)
    assert str(images) == "images in Fashion-MNIST's format, 7 training and 3 test images"
    assert images.train_images.shape == (7, 1, 28, 28)
    assert images.train_images.dtype == torch.float32
    assert images.train_images[1].unique().tolist() == [torch.tensor(1 / 255).item()]
    assert images.train_labels.tolist() == list(range(7))
    assert images.train_labels.dtype == torch.int64
    assert images.test_images[2].unique().tolist() == [torch.tensor(2 / 255).item()]
    assert images.test_labels.tolist() == [0, 1, 2]


def test_local_images_need_no_torchvision(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_idx_set(tmp_path / "images", 2, 1)
    assert len(load_data("fashion-mnist", "~/images").train_labels) == 2


@pytest.mark.usefixtures("offline")
class TestChosenDataset:
    @pytest.mark.parametrize("dataset", ["auto", "fashion-mnist"])
    @pytest.mark.parametrize("name", ["missing", "empty", "file", "file/folder", "other"])
    def test_missing_data_dir_raises(self, tmp_path, caplog, dataset, name):
        write_idx_set(tmp_path / "default", 7, 3)
        for folder in ("empty", "other"):
            (tmp_path / folder).mkdir()
        for file in ("file", "other/train-images.idx3-ubyte"):
            (tmp_path / file).touch()
        with pytest.raises(ArgumentError, match=r"^data_dir is '") as caught:
            load_data(dataset, tmp_path / name)
        for word in (str(tmp_path / name), "FashionMNIST/raw", IMAGES, "no network"):
            assert word in str(caught.value)
        assert not caplog.records

    def test_missing_named_dataset_raises(self, caplog):
        with pytest.raises(ArgumentError, match=f"^dataset is 'fashion-mnist', .*{IMAGES}"):
            load_data("fashion-mnist")
        with pytest.raises(ArgumentError, match="dataset is 'cifar'"):
            load_data("cifar")
        assert not caplog.records

    def test_fallback_to_synthetic_warns(self, tmp_path, caplog):
        assert load_data().name == "synthetic garments"
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        first, reason = record.getMessage().splitlines()
        expected = "Training on synthetic images (Fashion-MNIST could not be downloaded)."
        assert first == expected
        assert "no network" in reason
        assert str(tmp_path / "default") in reason

    def test_broken_default_files_raise(self, tmp_path):
        write_idx_set(tmp_path / "default", 7, 3)
        (tmp_path / "default" / LABELS).write_bytes(b"")
        with pytest.raises(ArgumentError, match=f"dataset is 'auto', but .*{LABELS}' has 0 bytes"):
            load_data()

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_incomplete_files_raise(self, tmp_path, suffix):
        write_idx_set(tmp_path, 7, 3, suffix)
        (tmp_path / f"t10k-labels-idx1-ubyte{suffix}").unlink()
        with pytest.raises(
            ArgumentError, match=r"lacks t10k-labels-idx1-ubyte; add the missing files"
        ):
            load_data("auto", tmp_path)

    @pytest.mark.parametrize("data_dir", ["", b"images", "a\0b"])
    def test_malformed_folder_raises(self, data_dir):
        with pytest.raises(ArgumentError, match=r"^data_dir is .*, expected the path of a folder"):
            load_data("auto", data_dir)


def header(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)


PIXELS = bytes(784)
WANTED_IMAGES = r"expected \(2051, 'n', 28, 28\) and then n x 784 bytes of images"
WRONG_IMAGES = [
    (b"", rf"has 0 bytes .*{WANTED_IMAGES}"),
    (header(2051, 7, 28, 28)[:15], rf"has 15 bytes .*{WANTED_IMAGES}"),
    (header(2049, 7) + bytes(8), rf"numbers \(2049, 7, .*{WANTED_IMAGES}"),
    (header(0xD03, 7, 28, 28) + 7 * PIXELS, r"numbers \(3331, 7, 28, 28\)"),
    (header(2051, 7, 32, 32) + 7 * bytes(1024), r"numbers \(2051, 7, 32, 32\)"),
    (header(2051, 0, 28, 28), r"has 16 bytes .* \(2051, 0, 28, 28\)"),
    (header(2051, 7, 28, 28) + 7 * PIXELS[:-1], "has 5,497 bytes"),
    (header(2051, 7, 28, 28) + 7 * PIXELS + b"\0", "has 5,505 bytes"),
    (header(2051, 2**32 - 1, 28, 28) + PIXELS, r"has 800 bytes .* \(2051, 4294967295, "),
    (header(2051, 6, 28, 28) + 6 * PIXELS, "holds 7 labels, expected 6, one per image"),
]
WRONG_LABELS = [
    (header(2049, 7)[:7], r"has 7 bytes .*expected \(2049, 'n'\) .* of labels"),
    (header(2049, 7) + bytes(6), "has 14 bytes .* n x 1 bytes"),
    (header(2049, 7) + bytes([9, 0, 10, 0, 0, 0, 0]), "label 10 at index 2, expected 0 to 9"),
]
WRONG = [(IMAGES, *case) for case in WRONG_IMAGES] + [(LABELS, *case) for case in WRONG_LABELS]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_malformed_file_raises(tmp_path, suffix):
    for name, content, message in WRONG:
        write_idx_set(tmp_path, 7, 3, suffix)
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(gzip.compress(content) if suffix else content)
        with pytest.raises(ArgumentError, match=f"^data_dir is '.*'.*{message}") as caught:
            load_data("fashion-mnist", tmp_path)
        assert f"{path}'" in str(caught.value)


def test_damaged_archive_raises(tmp_path):
    write_idx_set(tmp_path, 7, 3, ".gz")
    path = tmp_path / f"{IMAGES}.gz"
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-6] ^= 1  # flips a bit of the checksum
    broken_code = whole[:10] + b"\xff" * (len(whole) - 10)
    for content in (b"", b"plain", whole[:-9], bytes(damaged), broken_code, whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=f"{IMAGES}.gz' (cannot be read|has 0 bytes)"):
            load_data("auto", tmp_path)


def test_batches_cover_all_images_once():
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
    def test_synthetic_shapes_ranges_and_balance(self):
        images, labels = synthetic_images(207, seed=0)
        assert (images.shape, images.dtype) == ((207, 1, 28, 28), torch.float32)
        assert labels.bincount().tolist() == [21] * 7 + [20] * 3
        assert 0 <= images.min() <= images.max() <= 1
        assert (images.flatten(1).amax(1) > 0.1).all(), "an image is blank"
        assert not torch.equal(labels, labels.sort().values)
        with pytest.raises(ArgumentError, match="n is 0"):
            synthetic_images(0, seed=0)

    def test_seed_determines_synthetic_images(self):
        first, second, other = (synthetic_images(500, seed) for seed in (3, 3, 4))
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert not torch.equal(first[0], other[0])
        assert len(first[0].flatten(1).unique(dim=0)) == 500, "two images are alike"


NAMES = [
    f"{half}-{kind}-ubyte" for half in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def mirror(tmp_path, monkeypatch):
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
    assert re.search(r"100(\.0)?%", capsys.readouterr().err)  # progress with or without tqdm
    assert {f"FashionMNIST/raw/{name}" for name in NAMES} <= set(tree(folder))
    assert not list(folder.glob(".download-*"))
    monkeypatch.setattr(data_module, "_download", None)
    assert load_data("fashion-mnist", folder).test_labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("end", [b"", b"!"])
def test_broken_download_leaves_no_file(tmp_path, mirror, end):
    archive = mirror / f"{NAMES[3]}.gz"
    content = archive.read_bytes()
    archive.write_bytes(content[:-1] + end)
    with pytest.raises(ArgumentError, match=r"^data_dir is .* and Fashion-MNIST cannot be dow"):
        load_data("auto", tmp_path / "images")
    assert tree(tmp_path / "images") == []
    archive.write_bytes(content)
    assert len(load_data("auto", tmp_path / "images").train_labels) == 7


@pytest.mark.usefixtures("mirror")
def test_download_by_another_process_is_used(tmp_path, monkeypatch):
    from torchvision.datasets import FashionMNIST

    real = FashionMNIST.__init__

    def other_first(self, root, download):
        monkeypatch.setattr(FashionMNIST, "__init__", real)
        data_module._download(tmp_path / "images")
        real(self, root, download=download)

    monkeypatch.setattr(FashionMNIST, "__init__", other_first)
    assert len(load_data("auto", tmp_path / "images").train_labels) == 7


def test_missing_torchvision_falls_back(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    monkeypatch.setattr(data_module, "default_data_dir", lambda: tmp_path)
    monkeypatch.setattr(data_module, "_SYNTHETIC_TRAIN", 10)
    assert load_data("auto").name == "synthetic garments"
    assert "torchvision, which downloads it, cannot be imported (ModuleNotFoundErr" in caplog.text
