"""Test options, files and output of ``pyringar train`` and ``pyringar trace``."""

from __future__ import annotations

import argparse
import csv
import errno
import itertools
import json
import logging
import os
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from training_runs import garments

import pyringar as pr
from pyringar.cli import main, status_line, train_output
from pyringar.cli import train as cli_train
from pyringar.engine import load
from pyringar.errors import ArgumentError, CompilerNotFoundError
from pyringar.train import TrainConfig, Trainer, config, resnet18
from pyringar.train import trainer as trainer_module
from pyringar.train.step_trace import CATEGORIES, Trace, covered_s

LENET = ["train", "lenet", "--epochs", "2", "--batch-size", "20"]
LINE = r"test acc: \d\.\d{2}, \d+\.\d sec/epoch on \[.*\]"


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    images = garments(75, 30)
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: images)
    return images


def rows_of(out):
    rows = [line.split() for line in out.splitlines()]
    return [row[:3] for row in rows if len(row) == 4 and row[0].isdecimal()]


# -- options -------------------------------------------------------------------------------------


def parse(*arguments):
    parser = argparse.ArgumentParser()
    cli_train.add_parser(parser.add_subparsers())
    return vars(parser.parse_args(["train", "lenet", *arguments]))


def test_command_options_match_train_config():
    commands = argparse.ArgumentParser().add_subparsers()
    cli_train.add_parser(commands)
    actions = {action.dest: action for action in commands.choices["train"]._actions}
    defaults = {field.name: getattr(TrainConfig(), field.name) for field in fields(TrainConfig)}
    del defaults["dtype"]  # the command has no --dtype
    assert defaults.keys() <= actions.keys()
    defaults["ranks"] = TrainConfig().world_size
    for name, default in defaults.items():
        if default is not None and not isinstance(default, bool) and name != "model":
            assert f"({default})" in actions[name].help
    for name in config.CHOICES.keys() & actions.keys():
        assert tuple(actions[name].choices) == config.CHOICES[name]
    assert parse() == {"model": "lenet"}, "an option not given must not override a default"
    assert parse("--devices", "cuda:0, cpu")["devices"] == ("cuda:0", "cpu")
    assert parse("--weights", "3,1.5")["weights"] == (3.0, 1.5)


# -- files -----------------------------------------------------------------------------------------


def test_log_has_row_per_finished_epoch(capsys, tmp_path, monkeypatch):
    path, lengths = tmp_path / "L.CSV", []
    path.write_text("of an older run\n" * 9)
    real = train_output.Outputs.add_epoch

    def spy(self, result):
        real(self, result)
        lengths.append(len(path.read_text().splitlines()))

    monkeypatch.setattr(train_output.Outputs, "add_epoch", spy)
    assert main([*LENET, "--log", str(path)]) == 0
    assert lengths == [2, 3]
    head, *rows = csv.reader(path.read_text().splitlines())
    assert head == ["epoch", "loss", "accuracy", "seconds"]
    shown = [[n, f"{float(loss):.4f}", f"{float(share):.3f}"] for n, loss, share, _ in rows]
    assert shown == rows_of(capsys.readouterr().out)


def test_json_is_only_output_on_stdout(capsys, tmp_path):
    log = tmp_path / "l.csv"
    assert main([*LENET, "--devices", "cpu,cpu", "--log", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    with log.open(newline="") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert document["epochs"] == rows
    assert document["config"]["batch_size"] == 20
    assert document["devices"] == document["config"]["devices"] == ["cpu", "cpu"]
    assert main([*LENET, "--json", "--live"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "--live is True, but --json draws nothing" in said.err


@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_infinite_loss_ends_training(capsys, tmp_path, mode):
    folder = tmp_path / "run"
    assert main([*LENET, "--lr", "1e30", "--save", str(folder), *mode]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"the loss of epoch 1 is (nan|inf), .* smaller learning rate than lr=1e", err)
    assert len(rows_of(out)) == (0 if mode else 1), "later epochs do not run"
    assert os.listdir(folder) == []


def test_out_file_loads_into_module(capsys, tmp_path, few_images):
    path, net = tmp_path / "net.pt", resnet18(width=4)
    options = ["--width", "4", "--epochs", "1", "--batch-size", "25", "--out", str(path)]
    assert main(["train", "resnet18", *options]) == 0
    net.eval().load_state_dict(torch.load(path, weights_only=True))
    right = (net(few_images.test_images).argmax(1) == few_images.test_labels).float().mean()
    assert rows_of(capsys.readouterr().out)[0][2] == f"{right:.3f}"


ENDINGS = {"plot": "png", "trace": "json", "out": "pt", "log": "csv"}


@pytest.mark.parametrize("name", [*ENDINGS, "save", "resume"])
def test_unwritable_outputs_raise_before_training(capsys, tmp_path, name, monkeypatch):
    monkeypatch.setattr(Trainer, "_train_batch", None)
    monkeypatch.chdir(tmp_path)
    ending = f".{ENDINGS[name]}" if name in ENDINGS else ""
    (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / "file").write_text("")
    bad = [f"no/x{ending}", f"/proc/x{ending}", f"file/x{ending}", "a" * 300 + ending, ""]
    bad += ["x", "x.pdf", f"folder{ending}", ending] if ending else ["file"]
    for path in bad:
        assert main([*LENET, f"--{name}", path]) != 0, path
        captured = capsys.readouterr()
        assert f"--{name} is '{path}'" in captured.err
        assert "test acc" not in captured.out
    assert sorted(os.listdir(tmp_path)) == sorted(["file", f"folder{ending}"]), "no file is left"


def test_resume_errors_name_command_flag(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*LENET, "--weights", "3,1", "--no-overlap", "--save", "run"]) == 0
    for options, words in [
        (["--no-overlap"], "--weights is not given, but the checkpoint has (3.0, 1.0)"),
        (["--weights", "3,1"], "overlap is True, but the checkpoint has False"),
        (["--save", "run"], "go on from it with --resume='run', name another"),
    ]:
        resume = [] if "--save" in options else ["--resume", "run"]
        capsys.readouterr()
        assert main([*LENET, *options, *resume]) == 2
        assert words in capsys.readouterr().err.replace("train: --no-", "train: not ")


def test_failed_writes_keep_other_outputs(capsys, tmp_path, monkeypatch):
    names = {"log": "l.csv", "plot": "p.png", "out": "m.pt", "trace": "t.json"}
    files = {name: tmp_path / file for name, file in names.items()}
    files["out"].write_text("an older one")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_):
        raise ArgumentError("step is None")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(train_output, "_append_row", full)
    monkeypatch.setattr(Trace, "save", refuse)
    assert main([*LENET, *(f"--{name}={path}" for name, path in files.items())]) == 1
    captured = capsys.readouterr()
    assert len(rows_of(captured.out)) == 2
    assert captured.out.splitlines()[-1].startswith("test acc: ")
    (line,) = captured.err.splitlines()
    for name, why in {**dict.fromkeys(("log", "out"), "No space left"), "trace": "step is"}.items():
        assert f"--{name} is '{files[name]}', which could not be written: {why}" in line
    assert files["plot"].exists()
    assert files["out"].read_text() == "an older one"


def test_interrupted_training_explains_resume(capsys, tmp_path, monkeypatch, caplog):
    options = [*LENET, "--weights", "3,1", "--no-overlap", "--log", str(tmp_path / "l.csv")]
    folder = str(tmp_path / "my run")
    assert main(options) == 0
    whole = rows_of(capsys.readouterr().out)
    real, steps = Trainer._train_batch, []

    def interrupted(*arguments):
        real(*arguments)
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_train_batch", interrupted)
    assert main([*options, "--save", folder]) == 130
    assert "interrupted" in capsys.readouterr().err
    steps.clear()
    assert main(options) == 130
    saved, lost = caplog.messages
    assert saved.startswith(f"finished epochs are in '{folder}'; to go on: the same command with")
    assert lost.startswith("nothing was kept: --save DIR keeps finished epochs")
    capsys.readouterr()
    assert main([*options, "--resume", folder]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 epochs are done; going on" in " ".join(out.split())
    assert rows_of(out) == whole, "the table equals that of an uninterrupted run"
    assert len((tmp_path / "l.csv").read_text().splitlines()) == 3


# -- terminal output -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("lenet --ranks 1", "none: a single rank has no gradients to exchange"),
        ("lenet --verbose", "2,065,088 bytes of memory traffic"),
        ("lenet --allreduce naive", "naive: rank 0 receives all gradients and returns their sum"),
        ("lenet --ranks 4", "garments, 75 training and 30 test images"),
        (f"lenet --ranks 16 --weights {'1.25,3.875,' * 7}1.25,3.875", "shared 1.25 : 3.875 : 1.25"),
        ("lenet --init book --lr-schedule constant --momentum 0.9", "constant, momentum 0.9, book"),
        ("lenet --no-overlap --bucket-cap-mb 0.1 --amp", "summed after backward"),
        ("resnet18 --width 4 --batchnorm sync --amp", "ResNet-18 of width 4, sync batch norm, 44,"),
    ],
)
def test_train_command_prints_options_and_epochs(capsys, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    files = {"plot": "p.png", "trace": "t.json", "out": "m.pt", "log": "l.csv", "save": "run"}
    options = [*options.split(), *(f"--{name}={file}" for name, file in files.items())]
    assert main(["train", *options, "--epochs", "2", "--batch-size", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    begin = lines.index(f"{'epoch':>5}  {'loss':>7}  {'acc':>6}  {'seconds':>7}")
    assert words in " ".join(" ".join(lines[:begin]).split())
    rows = [line.split() for line in lines[begin + 1 : begin + 3]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(len(row) == 4 and all(map(float, row)) for row in rows)
    written = {f"{name:<10} {file}" for name, file in files.items()}
    assert set(lines[begin + 3 : -1]) == written
    assert re.fullmatch(LINE, lines[-1])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "on [cpu" in Trace.load("t.json").title


def test_header_names_algorithm_without_internals(capsys):
    assert main(LENET) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "allreduce  fused: one pass over shared memory, sums in rank order" in lines
    assert not any("bytes" in line for line in lines)


def test_exchange_plan_is_described_as_direct():
    with pr.Communicator(["cpu"] * 2) as comm:
        plan = replace(comm.plan(1000), algorithm="exchange")
    assert train_output.describe_plan(plan).startswith("direct: every rank sums a slice")


def test_progress_is_logged_every_ten_seconds(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    main(LENET)
    assert not caplog.records, "an epoch under ten seconds logs nothing"
    clock = itertools.count(0, 4)
    fake = SimpleNamespace(monotonic=lambda: next(clock), process_time=lambda: 0)
    monkeypatch.setattr(status_line, "time", fake)
    main(LENET)
    assert [text.split(", ")[0] for text in caplog.messages] == [
        "epoch 1 of 2: step 3 of 4",
        "epoch 2 of 2: step 3 of 4",
    ]
    assert caplog.messages[0].endswith(" for all epochs")


def fake_run(monkeypatch, steps, step_s, cpu_share, **config):
    """Display the progress of steps that take ``step_s`` seconds on a fake clock."""
    clock = SimpleNamespace(now_s=0.0)
    fake = SimpleNamespace(
        monotonic=lambda: clock.now_s, process_time=lambda: clock.now_s * cpu_share
    )
    monkeypatch.setattr(train_output, "time", fake)
    cpus = (torch.device("cpu"),) * 2
    trainer = SimpleNamespace(config=TrainConfig(**config), devices=cpus, all_devices=cpus)
    trainer.step, trainer.steps_per_epoch = 0, 200
    display = train_output.EpochDisplay(trainer, is_live=False)
    for trainer.step in range(1, steps + 1):
        clock.now_s += step_s
        display.step()


def test_progress_estimates_time_left(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(train_output.STATUS, "show", texts.append)
    fake_run(monkeypatch, 150, 1.0, 2.0, epochs=3)
    assert texts[-1] == "epoch 1 of 3: step 150 of 200, 50 s left, 8 min for all epochs"


def test_slow_resnet_suggests_width(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    fake_run(monkeypatch, 30, 6.0, 2.0, model="resnet18")
    fake_run(monkeypatch, 30, 6.0, 2.0, model="lenet")
    fake_run(monkeypatch, 30, 0.1, 2.0, model="resnet18")
    (text,) = caplog.messages
    assert text == "an epoch takes about 20 min at width 64 on this machine; faster: --width 8"
    caplog.clear()
    fake_run(monkeypatch, 2, 12.0, 2.0, model="resnet18")  # the second step ends after 24 s
    assert caplog.messages == [text.replace("20", "40")]


@pytest.mark.parametrize(("share", "times"), [(1.9, 0), (0.5, 1)])
def test_busy_machine_warns_once(monkeypatch, caplog, share, times):
    fake_run(monkeypatch, 150, 0.1, share)
    assert caplog.text.count("other programs use the cores, so this is slower") == times


def test_ranks_without_images_warn(caplog, few_images):
    with Trainer(TrainConfig(70, 64), few_images):
        pass
    assert "6 of 70 ranks get no image of a batch of 64; use at most 64 ranks" in caplog.text


def test_missing_compiler_suggests_naive(monkeypatch, capsys):
    def refuse():
        raise CompilerNotFoundError("no C++ compiler")

    monkeypatch.setattr(load, "engine", refuse)
    assert main(LENET) == 1
    assert (
        "no C++ compiler. Or train without the engine: --allreduce naive" in capsys.readouterr()[1]
    )
    assert main([*LENET, "--shards", "4"]) == 1
    assert "naive" not in capsys.readouterr().err


# -- traces ----------------------------------------------------------------------------------------


COLUMNS = ["total", *CATEGORIES, "exposed"]


@pytest.fixture
def trace():
    made = Trace()
    phases = [("forward", 0, 4), ("backward", 4, 12), ("bucket", 6, 10), ("bucket", 10, 14)]
    phases += [("wait", 12, 14), ("optimizer", 14, 15)]
    for made.step in range(3):
        for rank, (kind, begin_ms, end_ms) in itertools.product(range(2), phases):
            at = made._begin_ns + made.step * 20_000_000
            times = at + begin_ms * 1_000_000, at + end_ms * 1_000_000
            name = {6: "bucket 0", 10: "bucket 1"}.get(begin_ms, kind)
            made.add(name, kind, rank, *times, nbytes=100 if kind == "bucket" else 0)
    return made


def test_trace_survives_save_and_load(trace, tmp_path):
    trace.save(tmp_path / "t.json")
    again = Trace.load(tmp_path / "t.json")
    assert len(again.spans) == len(trace.spans) == 36
    for ours, theirs in zip(again.spans, trace.spans, strict=True):
        assert replace(ours, begin_s=0, end_s=0) == replace(theirs, begin_s=0, end_s=0)
        times = theirs.begin_s, theirs.end_s
        assert (ours.begin_s, ours.end_s) == pytest.approx(times, abs=1e-9)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {(0, "rank 0"), (1, "rank 1"), (1, "computation"), (0, "buckets")} <= names
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["tid"] == (e["cat"] == "bucket") for e in spans)


def test_trace_command_prints_table_and_json(trace, tmp_path, capsys):
    file, trace.title = tmp_path / "t.json", "a net, 2 ranks"
    trace.save(file)
    assert main(["trace", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == [trace.title, " step" + "".join(f" {name:>9}" for name in COLUMNS)]
    one = [
        "15.00",
        "4.00",
        "8.00",
        "8.00",
        "2.00",
        "1.00",
        "2.00",
    ]  # the bucket and wait spans overlap by 2 ms
    assert [line.split() for line in lines[2:6]] == [[n, *one] for n in ("0", "1", "2", "mean")]
    assert main(["trace", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == trace.title
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    assert [found["mean"][f"{name}_ms"] for name in COLUMNS] == pytest.approx(list(map(float, one)))


def test_trace_table_omits_missing_buckets(trace):
    assert "bucket:" in str(trace)
    trace.spans = [span for span in trace.spans if span.category != "bucket"]
    assert "bucket" not in str(trace)
    assert "exposed" not in str(trace)


# -- recorded spans --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("lenet", {"weights": (1, 0, 1)}),
        ("resnet18", {"width": 8, "batchnorm": "sync"}),
        ("lenet", {"shards": 6}),
    ],
)
def test_trace_has_phases_of_all_ranks(model, options):
    config = TrainConfig(3, 20, epochs=1, model=model, **options)
    trace = Trace()
    with Trainer(config, garments(40, 10), trace=trace) as trainer:
        trainer.run()
    kinds = ["forward", "backward", "optimizer"] + ["bucket"] * ("shards" not in options)
    assert trace.steps() == [0, 1]
    for step in trace.steps():
        found = {(span.category, span.rank) for span in trace.of_step(step)}
        assert set(itertools.product(kinds, range(3))) <= found
    assert all(span.seconds >= 0 for span in trace.spans)
    assert trace.title.endswith("on [cpu x 3 ranks]")
    assert {"lenet": "LeNet", "resnet18": "ResNet-18 of width 8"}[model] in trace.title


def test_overlapping_spans_count_once():
    trace = Trace()
    at = trace._begin_ns
    for begin_ms, end_ms in ((10, 14), (0, 4), (2, 6), (3, 5), (14, 15)):
        trace.add("wait", "wait", 0, at + begin_ms * 10**6, at + end_ms * 10**6)
    assert covered_s(trace.spans) == pytest.approx(11e-3)
    assert covered_s([]) == 0


# -- malformed files -------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 200
SPAN = b'{"ph":"X","name":"n","cat":"wait","pid":0,"ts":0,"dur":%s,"args":{"step":0,"bytes":0}}'
TRACE = b'{"otherData": {"title": ""}, "traceEvents": [%s]}'


MALFORMED = [
    (b"", "Expecting value"),
    (PNG, "UnicodeDecodeError"),
    (b"{}", "otherData"),
    (TRACE % b"", "it holds no step"),
    (TRACE % b"{}", "KeyError: 'ph'"),
    (TRACE % (SPAN % b"1").replace(b"wait", b"lunch"), "category is 'lunch', expected one of"),
    (TRACE % (SPAN % b"-1"), "-1 microseconds"),
    (TRACE % (SPAN % b"NaN"), "nan microseconds"),
    (TRACE % (SPAN % b'"%s"' % (b"x" * 10**6)), "could not convert"),
]


def test_malformed_traces_raise(tmp_path, capsys):
    file = tmp_path / "other.json"
    for content, why in MALFORMED:
        file.write_bytes(content)
        assert main(["trace", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{file} is not a trace of `pyringar train` (" in line
        assert why in line
        assert len(line) < 300


def test_unreadable_trace_file_raises(tmp_path):
    with pytest.raises(pr.ArgumentError, match=f"{tmp_path} cannot be read: Is a directory"):
        Trace.load(tmp_path)
