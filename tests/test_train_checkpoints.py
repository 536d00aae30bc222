"""Test checkpoints: resume is bit-identical, and wrong or damaged files raise."""

from __future__ import annotations

import functools
import io
import operator
import os
import shutil
import signal
import subprocess
import sys
from pathlib import PurePath

import pytest
import torch
from case_marks import mostly_slow
from training_runs import garments, same_results

from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import TrainConfig, Trainer, checkpoint, train
from pyringar.train import trainer as trainer_module
from pyringar.train.checkpoint import Checkpoint

LENET = {
    "batch_size": 20,
    "epochs": 3,
}  # 75 images: 4 steps per epoch, the last with a smaller batch
RESNET = {"model": "resnet18", "width": 4, "batch_size": 20, "epochs": 2}
FILE = "checkpoint.bin"


@pytest.fixture(scope="module")
def images():
    return garments(75, 30)


def go(images, options, stop_in=None, on_epoch=None, **folders):
    with Trainer(TrainConfig(**options), images, **folders) as trainer:

        def step():
            if trainer.step == stop_in * trainer.steps_per_epoch - 1:
                raise KeyboardInterrupt

        if stop_in is None:
            return trainer.run(on_epoch=on_epoch)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(on_step=step)
    return None


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    go(images, LENET, 2, save=folder)
    return folder / FILE


@pytest.fixture
def saved(trained, tmp_path):
    shutil.copy(trained, tmp_path)
    return tmp_path


RUNS = [
    {**LENET, "ranks": 3, "allreduce": "ring", "bucket_cap_mb": 0.1, "momentum": 0.9},
    {**RESNET, "width": 16, "ranks": 2, "channels_last": True, "momentum": 0.9},
]
MORE_RUNS = [
    {**LENET, "ranks": 1},
    {**LENET, "ranks": 3, "dtype": "float64", "momentum": 0.9},
    {**RESNET, "ranks": 2, "batchnorm": "sync"},
    {**RESNET, "ranks": 3, "batch_size": 37, "allreduce": "ring", "bucket_cap_mb": 0.02},
]


@pytest.mark.parametrize("options", mostly_slow([*RUNS, *MORE_RUNS], RUNS[0]), ids=str)
def test_resume_is_bit_identical(images, tmp_path, options):
    whole = go(images, options)
    here = tmp_path / "run"
    go(images, options, 2, save=here)
    if options["epochs"] > 2:
        go(images, options, 3, resume=here)
    same_results(go(images, options, resume=here), whole)
    assert [path.name for path in here.iterdir()] == [FILE], "nothing else is left there"


def test_epoch_is_saved_before_callback(images, tmp_path, monkeypatch):
    def look(result):
        found = Checkpoint.decode((tmp_path / FILE).read_bytes(), tmp_path)
        assert len(found.epochs) == result.epoch

    monkeypatch.setenv("HOME", str(tmp_path.parent))
    told = []
    result = go(images, LENET, on_epoch=look, save=f"~/{tmp_path.name}")
    again = go(images, LENET, on_epoch=told.append, resume=tmp_path)
    same_results(again, result)
    assert told == list(result.epochs), "a finished run tells its epochs, and does nothing"


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_finished_run_resumes_with_more_epochs(images, tmp_path, schedule):
    options = {**LENET, "lr_schedule": schedule}
    folder = PurePath(tmp_path)
    short = go(images, {**options, "epochs": 1}, save=folder)
    longer = go(images, options, resume=folder)
    assert longer.epochs[:1] == short.epochs
    assert len(longer.epochs) == 3
    if schedule == "constant":
        same_results(longer, go(images, options))
    with pytest.raises(ArgumentError, match=r"epochs is 2, but .* of a run of 3"):
        go(images, {**options, "epochs": 2}, resume=tmp_path)


def test_save_elsewhere_keeps_old_checkpoint(images, saved):
    before, second = (saved / FILE).read_bytes(), saved / "second"
    others = {"allreduce": "direct", "data_dir": "/nowhere"}  # options that do not change results
    result = go(images, {**LENET, **others}, save=second, resume=saved)
    assert (saved / FILE).read_bytes() == before
    same_results(result, go(images, LENET))
    same_results(go(images, LENET, resume=second), result)
    same_results(go(images, LENET, save=saved, resume=saved), result)


def test_train_accepts_save_and_resume(images, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: images)
    first = train(2, 20, 0.1, epochs=1, save=tmp_path)
    same_results(train(2, 20, 0.1, epochs=1, resume=str(tmp_path)), first)


# -- errors ----------------------------------------------------------------------------------------


def test_resume_with_other_options_raises(images, saved):
    before = (saved / FILE).read_bytes()
    for changed, words in [
        ({"model": "resnet18"}, "model is 'resnet18', but the checkpoint has 'lenet'"),
        ({"ranks": 3}, "ranks is 3, but the checkpoint has 2"),
        ({"batch_size": 10}, "batch_size is 10, but the checkpoint has 20"),
        ({"dtype": "float64"}, "dtype is 'float64', but the checkpoint has 'float32'"),
        ({"seed": 1}, "seed is 1, but the checkpoint has 0"),
        ({"weights": (2, 1)}, "weights is (2.0, 1.0), but the checkpoint has None"),
        ({"bucket_cap_mb": 1}, "bucket_cap_mb is 1.0, but"),
        ({"allreduce": "ring"}, "allreduce is 'in ring order', but the checkpoint has 'in rank"),
    ]:
        with pytest.raises(ArgumentError) as caught:
            go(images, {**LENET, **changed}, resume=saved)
        assert words in str(caught.value)
    assert (saved / FILE).read_bytes() == before


def test_resume_with_other_images_raises(saved):
    changed = garments(75, 30)
    changed.test_labels[0] += 1
    with pytest.raises(ArgumentError, match=r"dataset is .* digest .* checkpoint has .* digest"):
        go(changed, LENET, resume=saved)


def test_damaged_checkpoint_raises(images, saved):
    content = (saved / FILE).read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged, words in [
        (b"", "is no checkpoint of this version of pyringar"),
        (content[:22], "is damaged"),
        (content[:-1], "is damaged"),
        (bytes(flipped), "is damaged"),
        (content.replace(b" 3\n", b" 2\n", 1), "is no checkpoint of this"),
    ]:
        (saved / FILE).write_bytes(damaged)
        with pytest.raises(ArgumentError) as caught:
            go(images, LENET, resume=saved)
        assert f"resume is '{saved}', but its checkpoint.bin {words}" in str(caught.value)
        assert (saved / FILE).read_bytes() == damaged


TWO_BYTES = torch.ones(2, dtype=torch.uint8)
# Each row: a field of the checkpoint, its wrong value, and words of the error message.
WRONG = [
    ("recipe", None, "recipe None"),
    ("recipe lr", ..., "recipe {"),
    ("recipe lr", "1", "lr is 0.1, but the checkpoint has '1'"),
    ("recipe dataset", [[1.0, "a"]], "dataset is"),
    ("setting", {"a": None}, "setting {'a': None}"),
    ("setting torch", TWO_BYTES, "setting {"),
    ("num_epochs", True, "num_epochs True"),
    ("num_epochs", 0, "num_epochs 0, expected a whole number"),
    ("num_epochs", 1000, "epochs is 3, but the checkpoint"),
    ("epochs", [], "epochs []"),
    ("epochs", [[n, 0.1, 1.0, 0.0] for n in range(1, 5)], "has 4 epochs, expected at most num_ep"),
    ("epochs 0", [1, 0.1, 1.0], "epochs [[1"),
    ("epochs 0 0", 2, "epochs [[2"),
    ("epochs 0 1", "1", "epochs [[1, '1'"),
    ("epochs 0 2", float("nan"), "epochs [[1"),
    ("epochs 0 2", 1.1, "epochs [[1"),
    ("epochs 0 3", float("inf"), "epochs [[1"),
    ("epochs 0 3", -1, "epochs [[1"),
    ("shuffle", torch.empty(0, dtype=torch.complex64), "shuffle tensor("),
    ("shuffle", TWO_BYTES, "shuffle that is no state of a torch.Generator"),
    ("tensors", None, "tensors None"),
    ("tensors", ..., "holds ['epochs',"),
    ("tensors", [], "entry 0 is missing, expected"),
    ("tensors 0", "1", "tensors ['1'"),
    ("tensors 0", TWO_BYTES, "entry 0 is (2,) torch.uint8"),
    ("more", 1, "holds ['epochs', 'more',"),
]


def test_error_names_wrong_checkpoint_field(images, saved, monkeypatch):
    monkeypatch.setattr(trainer_module, "batches", None)  # training would raise another error
    content = (saved / FILE).read_bytes()
    start = len(checkpoint._FIRST_LINE)
    for field, value, words in WRONG:
        state = torch.load(io.BytesIO(content[start + 32 :]), weights_only=True)
        *path, last = (int(key) if key.isdecimal() else key for key in field.split())
        place = functools.reduce(operator.getitem, path, state)
        if value is ...:
            del place[last]
        else:
            place[last] = value
        payload = io.BytesIO()
        torch.save(state, payload)
        digest = checkpoint._digest(payload.getvalue())
        (saved / FILE).write_bytes(content[:start] + digest + payload.getvalue())
        with pytest.raises(ArgumentError) as caught:
            go(images, LENET, resume=saved)
        assert words in str(caught.value), field


def test_save_refuses_existing_checkpoint(images, saved):
    before = (saved / FILE).read_bytes()
    with pytest.raises(ArgumentError, match=rf"go on from it with resume='{saved}'"):
        go(images, LENET, save=saved)
    assert (saved / FILE).read_bytes() == before


def test_second_trainer_run_raises(images):
    with Trainer(TrainConfig(**{**LENET, "epochs": 1}), images) as trainer:
        trainer.run()
        with pytest.raises(RingarError, match="run was called before: make another Trainer"):
            trainer.run()


def test_constant_learning_rate_allows_second_run(images):
    options = {**LENET, "lr_schedule": "constant"}
    whole = go(images, {**options, "epochs": 2})
    with Trainer(TrainConfig(**{**options, "epochs": 1}), images) as trainer:
        halves = [trainer.run() for _ in range(2)]
    assert [half.losses[0] for half in halves] == whole.losses
    check_replicas_equal([halves[1].params, whole.params])


def test_resume_logs_changed_torch_or_threads(images, saved, caplog, monkeypatch):
    go(images, LENET, 3, resume=saved)
    assert not caplog.records
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 93)
    monkeypatch.setattr(torch, "__version__", "1.0")
    go(images, LENET, resume=saved)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("torch: 1.0 now, 2.")
    there = f"93 now, {threads} when the checkpoint in '{saved}'"
    assert second.startswith(f"torch threads per rank: {there}")


# -- writing ---------------------------------------------------------------------------------------


def test_failed_write_keeps_last_checkpoint(images, tmp_path, monkeypatch):
    real, told = os.fsync, []

    def full(descriptor):
        if len(told) == 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    (tmp_path / f".{FILE}.new").write_bytes(b"half" * 10**6)  # a killed process leaves this
    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(RingarError, match=r"checkpoint\.bin' cannot be written: No space left"):
        go(images, LENET, on_epoch=told.append, save=tmp_path)
    assert len(told) == 2, "the epoch that could not be saved is told"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert len(Checkpoint.decode((tmp_path / FILE).read_bytes(), tmp_path).epochs) == 1


# -- the command -----------------------------------------------------------------------------------

ALONE = [sys.executable, "-m", "pyringar", "train", "lenet", "--dataset", "synthetic"]
ALONE += ["--epochs", "4", "--batch-size", "500"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
TOGETHER = [ALONE[0], *TORCHRUN, *ALONE[1:]]


def rows(lines):
    return [line.split()[:3] for line in lines if line[:5].strip().isdecimal()]


def run_command(command, stop=None, after=0):
    """Return output and status; send the signal ``stop`` after ``after`` rows of the table."""
    lines = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        for line in process.stdout:
            lines.append(line)
            if stop is not None and len(rows(lines)) == after:
                process.send_signal(stop)
                stop = None
    return lines, process.returncode


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_run_resumes_with_other_processes(tmp_path):
    """Kill a run in each epoch, and resume it each time with another number of processes."""
    folder, files = tmp_path / "run", [tmp_path / "whole.pt", tmp_path / "resumed.pt"]
    whole, status = run_command([*ALONE, "--out", str(files[0])])
    assert status == 0, whole
    stops = [(ALONE, signal.SIGKILL), (TOGETHER, signal.SIGINT), (ALONE, signal.SIGTERM)]
    for number, (command, stop) in enumerate(stops, 1):
        option = "--save" if number == 1 else "--resume"
        stopped, status = run_command([*command, option, str(folder)], stop, number)
        assert status != 0
        assert [path.name for path in folder.iterdir()] == [FILE]
        assert number <= len(rows(stopped)) < 4, "it was stopped between two epochs"
    rest, status = run_command([*ALONE, "--resume", str(folder), "--out", str(files[1])])
    assert status == 0, rest
    assert rows(rest) == rows(whole)
    wanted, found = (torch.load(path, weights_only=True) for path in files)
    assert list(found) == list(wanted)
    check_replicas_equal([list(found.values()), list(wanted.values())])
