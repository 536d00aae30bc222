"""Do the files of ``pyringar train`` come out, or say before the first step why they cannot?

And do the lines it prints fit a terminal, and say how far it is?
"""

from __future__ import annotations

import csv
import errno
import json
import logging
import os
import shlex
import signal
import sys

import pytest
import torch
from training import garments

from pyringar.cli import main, paths, train_output
from pyringar.cli import train as train_command
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.train import EpochLog, EpochResult, LeNet, TrainConfig, Trainer, resnet18
from pyringar.train import remarks as remarks_module
from pyringar.train import trainer as trainer_module
from pyringar.train.log import TensorBoardLog
from pyringar.train.remarks import BusyCores
from pyringar.train.trace import Trace

LENET = ["train", "lenet", "--epochs", "2", "--batch-size", "20"]
COLUMNS = 80


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    images = garments(75, 30)
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: images)
    return images


@pytest.fixture
def no_step(monkeypatch):
    """Fails what takes a step."""

    def step(*_):
        raise AssertionError("a step was run")

    monkeypatch.setattr(Trainer, "_train_batch", step)


def rows_of(out):
    """What the table of epochs says, but for the times."""
    rows = [line.split() for line in out.splitlines()]
    return [row[:3] for row in rows if len(row) == 4 and row[0].isdecimal()]


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["l.csv", "l.jsonl", "L.CSV"])
def test_a_log_has_a_line_per_epoch_as_soon_as_it_is_done(capsys, tmp_path, monkeypatch, name):
    path, lengths = tmp_path / name, []
    path.write_text("of an older run\n" * 9)
    real = EpochLog.__call__

    def spy(self, result):
        real(self, result)
        lengths.append(len(path.read_text().splitlines()))

    monkeypatch.setattr(EpochLog, "__call__", spy)
    assert main([*LENET, "--log", str(path)]) == 0
    header = path.suffix.lower() == ".csv"
    assert lengths == [1 + header, 2 + header]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file)) if header else [json.loads(line) for line in file]
    assert [list(row) for row in rows] == [["epoch", "loss", "accuracy", "seconds"]] * 2
    shown = [[f"{float(row['loss']):.4f}", f"{float(row['accuracy']):.3f}"] for row in rows]
    assert shown == [row[1:] for row in rows_of(capsys.readouterr().out)]


def test_json_is_all_that_stdout_gets(capsys, tmp_path):
    log = tmp_path / "l.jsonl"
    assert main([*LENET, "--devices", "cpu,cpu", "--log", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["epochs"] == [json.loads(line) for line in log.read_text().splitlines()]
    assert document["config"]["batch_size"] == 20
    assert document["devices"] == document["config"]["devices"] == ["cpu", "cpu"]
    assert main([*LENET, "--json", "--live"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "--live is True, but with --json nothing is drawn" in said.err


def test_a_loss_that_is_no_number_is_null_in_json_lines(tmp_path):
    with EpochLog(tmp_path / "l.jsonl") as log:
        log(EpochResult(1, float("nan"), 0.1, 2.0))
    line = (tmp_path / "l.jsonl").read_text()
    assert json.loads(line) == {"epoch": 1, "loss": None, "accuracy": 0.1, "seconds": 2.0}
    with pytest.raises(ArgumentError, match=r"path is 'l\.txt', expected an ending of \.csv or"):
        EpochLog("l.txt")


def test_the_parameters_are_loaded_by_the_module_that_is_named(capsys, tmp_path, few_images):
    for command, make in (
        (["lenet", "--dtype", "float64"], lambda: LeNet(dtype=torch.float64)),
        (["resnet18", "--width", "4"], lambda: resnet18(width=4)),
    ):
        path = tmp_path / f"{command[0]}.pt"
        options = ["--epochs", "1", "--batch-size", "25", "--out", str(path)]
        assert main(["train", *command, *options]) == 0
        out = capsys.readouterr().out
        named = {"lenet": "LeNet(dtype=torch.float64)", "resnet18": "resnet18(width=4)"}
        assert f"the parameters of pyringar.train.{named[command[0]]}" in " ".join(out.split())
        net = make().eval()
        net.load_state_dict(torch.load(path, weights_only=True))
        images = few_images.test_images.to(next(net.parameters()).dtype)
        right = (net(images).argmax(1) == few_images.test_labels).float().mean().item()
        assert rows_of(out)[0][2] == f"{right:.3f}"


def test_tensorboard_says_how_to_install_it_before_the_first_step(
    capsys, tmp_path, monkeypatch, no_step
):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    assert main([*LENET, "--tensorboard", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "--tensorboard" in err
    assert "pip install tensorboard" in err
    with pytest.raises(UnsupportedError, match="pip install tensorboard"):
        TensorBoardLog(tmp_path)


def test_tensorboard_gets_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main([*LENET, "--tensorboard", str(tmp_path)]) == 0
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("test/accuracy")] == [1, 2]
    assert set(found.Tags()["scalars"]) == {"train/loss", "train/seconds", "test/accuracy"}


ENDINGS = {"plot": "png", "trace": "json", "timeline": "png", "out": "pt", "log": "csv"}


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize("name", [*ENDINGS, "save", "tensorboard", "resume"])
def test_what_cannot_be_written_is_refused_by_its_flag_before_a_step(
    capsys, tmp_path, name, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ending = f".{ENDINGS[name]}" if name in ENDINGS else ""
    (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / "file").write_text("")
    bad = [f"no/x{ending}", f"/proc/x{ending}", f"file/x{ending}", "a" * 300 + ending]
    bad += ["", "closed/x/y" + ending]
    bad += ["x", "x.pdf", f"folder{ending}", ending] if ending else ["file"]
    real = os.stat

    def stat(path, *arguments, **options):
        if "closed/x" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    for path in bad:
        assert main([*LENET, f"--{name}", path]) != 0, path
        captured = capsys.readouterr()
        assert f"--{name} is '{path}'" in captured.err
        assert "test acc" not in captured.out
    assert sorted(os.listdir(tmp_path)) == sorted(["file", f"folder{ending}"]), "nothing is left"


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize("target", ["no/x.pt", "link.pt"])
def test_a_link_that_cannot_be_followed_is_refused(capsys, tmp_path, target, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.pt").symlink_to(target)
    assert main([*LENET, "--out", "link.pt"]) == 2
    assert "--out is 'link.pt', which cannot be written: " in capsys.readouterr().err
    assert os.readlink("link.pt") == target


@pytest.mark.usefixtures("no_step")
def test_a_file_that_cannot_be_replaced_is_refused(capsys, tmp_path, monkeypatch):
    path = tmp_path / "m.pt"
    path.write_text("mine")

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(paths.tempfile, "TemporaryFile", refuse)  # root may write everywhere
    assert main([*LENET, "--out", str(path)]) == 2
    assert f"--out is '{path}', which cannot be written: Permission" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_paths_may_be_at_home_behind_links_long_and_with_spaces(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent))
    long = "m " * 125 + "m.pt"
    (tmp_path / "link.pt").symlink_to(long)
    files = ["--out", "~/link.pt", "--log=~/l.csv", "--plot=~/p.png", "--save=~/run"]
    assert main([*LENET, *files]) == 0
    assert sorted(os.listdir(tmp_path)) == sorted(["link.pt", "run", "l.csv", "p.png", long])
    capsys.readouterr()
    assert main([*LENET, "--out", str(tmp_path / long)]) == 0
    assert f"out        {tmp_path / long},\n" in capsys.readouterr().out


def test_a_run_that_goes_on_is_traced_and_one_that_is_done_is_not(
    capsys, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(trainer_module, "_TRACED_STEPS", 3)
    monkeypatch.chdir(tmp_path)
    files = ["--trace", "t.json", "--timeline", "t.png", "--out", "m.pt"]
    assert main([*LENET, "--save", "run"]) == 0
    assert main([*LENET, "--epochs", "3", "--resume", "run", *files]) == 0
    assert len(Trace.load("t.json").steps()) == 3
    before = (tmp_path / "t.json").read_bytes()
    (tmp_path / "m.pt").unlink()
    caplog.clear()
    assert main([*LENET, "--epochs", "3", "--resume", "run", *files]) == 0
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"--{name}: all steps were done before, so nothing is written"
        for name in ("trace", "timeline")
    ]
    assert (tmp_path / "t.json").read_bytes() == before
    assert (tmp_path / "m.pt").exists()


def test_an_error_of_the_library_at_the_end_loses_no_result(capsys, tmp_path, monkeypatch):
    def refuse(*_):
        raise ArgumentError("step is None")

    monkeypatch.setattr(Trace, "plot", refuse)
    files = [
        f"--{name}={tmp_path / f'x.{ending}'}"
        for name, ending in (("timeline", "png"), ("out", "pt"), ("trace", "json"))
    ]
    assert main([*LENET, *files]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("test acc: ")
    assert "--timeline is" in captured.err
    assert sorted(os.listdir(tmp_path)) == ["x.json", "x.pt"]


def test_what_differs_from_a_checkpoint_is_named_as_it_was_typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*LENET, "--weights", "3,1", "--no-overlap", "--save", "run"]) == 0
    for options, words in [
        (["--no-overlap"], "--weights is not given, but the checkpoint in 'run' has [3.0, 1.0]"),
        (["--weights", "3,1"], "overlap is True, but the checkpoint in 'run' has False"),
        (["--save", "run"], "go on from it with --resume='run', name another"),
    ]:
        resume = [] if "--save" in options else ["--resume", "run"]
        capsys.readouterr()
        assert main([*LENET, *options, *resume]) == 2
        assert words in capsys.readouterr().err.replace("train: --no-", "train: not ")


def test_a_command_to_go_on_takes_values_that_begin_with_a_dash():
    found = train_command._command({"model": "lenet", "resume": "-r", "weights": (3.0, 1.0)})
    assert found == "pyringar train lenet --weights 3.0,1.0 --resume=-r"


@pytest.mark.usefixtures("no_step")
def test_checks_leave_files_as_they_are(capsys, tmp_path):
    plot, log = tmp_path / "p.png", tmp_path / "l.csv"
    log.write_text("mine")
    assert main([*LENET, "--log", str(log), "--plot", str(plot), "--out", "/proc/x.pt"]) != 0
    assert log.read_text() == "mine"
    assert not plot.exists()
    assert main([*LENET, "--plot", str(plot), "--timeline", str(plot)]) != 0
    assert f"--timeline is '{plot}', and so is --plot" in capsys.readouterr().err


def test_what_fails_at_the_end_loses_no_result(capsys, tmp_path, monkeypatch):
    log, plot, out = tmp_path / "l.csv", tmp_path / "p.png", tmp_path / "m.pt"
    out.write_text("an older one")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(EpochLog, "__call__", full)
    assert main([*LENET, "--log", str(log), "--out", str(out), "--plot", str(plot)]) == 1
    captured = capsys.readouterr()
    assert len(rows_of(captured.out)) == 2
    assert captured.out.splitlines()[-1].startswith("test acc: ")
    (line,) = captured.err.splitlines()
    assert f"--log is '{log}', which could not be written: No space left on device" in line
    assert f"--out is '{out}', which could not be written: No space left on device" in line
    assert plot.exists()
    assert out.read_text() == "an older one"


def test_a_training_that_was_interrupted_says_how_to_go_on(capsys, tmp_path, monkeypatch, caplog):
    options = [*LENET, "--weights", "3,1", "--no-overlap", "--log", str(tmp_path / "l.csv")]
    options += ["--no-cuda-graph"]
    folder = str(tmp_path / "my run")
    assert main(options) == 0
    whole = rows_of(capsys.readouterr().out)
    real, steps = Trainer._train_batch, []

    def interrupted(*arguments):
        real(*arguments)
        steps.append(1)
        if len(steps) == 6:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "_train_batch", interrupted)
    assert main([*options, "--save", folder]) == 130
    assert "interrupted" in capsys.readouterr().err
    stopped, command = (record.getMessage() for record in caplog.records[-2:])
    assert stopped == (f"stopped in epoch 2, after step 2 of 4; the checkpoint is in '{folder}'")
    words = shlex.split(command.removeprefix("to go on: "))
    assert words[:2] == ["pyringar", "train"]
    assert {"--no-overlap", "--no-cuda-graph"} <= set(words)
    assert "--save" not in words
    assert words[words.index("--resume") + 1] == folder
    assert main(words[1:]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 epochs and 2 steps are done; going on" in out
    assert rows_of(out) == whole, "the table is that of a run that was not stopped"
    assert len((tmp_path / "l.csv").read_text().splitlines()) == 3


# -- what is printed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["lenet", "--ranks", "1"],
        ["lenet", "--ranks", "16", "--weights", ",".join(["1.25", "3.875"] * 8)],
        ["lenet", "--ranks", "16", "--allreduce", "ring", "--dtype", "float64"],
        ["resnet18", "--width", "4", "--batchnorm", "sync", "--amp"],
    ],
    ids=lambda options: " ".join(options)[:30],
)
def test_every_line_fits_80_columns(capsys, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    files = ["--plot", "p.png", "--out", "m.pt", "--log", "l.csv", "--save", "run"]
    assert main(["train", *options, "--epochs", "1", "--batch-size", "75", *files]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= COLUMNS
    assert "\nsave       run\n" in out
    alone = options[-2:] == ["--ranks", "1"]
    assert ("one rank has nothing to add" in out) == alone
    assert ("bytes" in out) != alone


def test_progress_in_a_pipe_is_a_line_now_and_then(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    main(LENET)
    assert not caplog.records, "not in an epoch that is over at once"
    monkeypatch.setattr(train_output, "_PROGRESS_EVERY_S", 0)
    main(LENET)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"epoch {epoch}: step {step} of 4" for epoch in (1, 2) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 25}, "5 of 25 ranks get no image of a batch of 20"),
        ({"ranks": 21}, "1 of 21 ranks gets no image of a batch of 20"),
        ({"ranks": 80, "batch_size": 1000}, "5 of 80 ranks get no image of a batch of 75"),
        ({"ranks": 3, "weights": (100, 1, 0)}, "1 of 3 ranks gets no image of a batch of 20"),
        ({"ranks": 2, "weights": (1, 0)}, None),
        ({"ranks": 20}, None),
    ],
)
def test_ranks_without_images_are_told_before_the_first_step(caplog, few_images, options, words):
    with Trainer(TrainConfig(**{"batch_size": 20, **options}), few_images):
        assert [record.getMessage() for record in caplog.records] == ([words] if words else [])


@pytest.mark.parametrize(
    ("wall_s", "processor_s", "num_threads", "is_told"),
    [(6, 2, 2, True), (6, 5.5, 2, False), (6, 2, 1, False), (4, 1, 8, False)],
)
def test_a_busy_machine_with_several_threads_is_told_once(
    monkeypatch, caplog, wall_s, processor_s, num_threads, is_told
):
    now = [0.0, 0.0]
    monkeypatch.setattr(remarks_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(remarks_module.time, "process_time", lambda: now[1])
    now[0] += 100  # between steps and in the first one
    cores = BusyCores(True, num_threads)
    for first_or_stopped_s in (100, 100, 0, 0, 0):
        now[0] += 100
        with cores:
            now[0] += first_or_stopped_s or wall_s
            now[1] += 0 if first_or_stopped_s else processor_s
        if wall_s < 5 and not first_or_stopped_s:
            break
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == is_told
    if is_told:
        assert told[0] == (
            "6 s of training had 2 s of processor time: this machine is busy, and 2 torch threads "
            "wait for each other; try OMP_NUM_THREADS=1"
        )
