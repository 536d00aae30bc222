"""``pyringar train`` as one meets it: what it prints, and how it fails."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields

import pytest
from training import garments

from pyringar.cli import main
from pyringar.cli import train as cli_train
from pyringar.errors import RingarError
from pyringar.train import TrainConfig, config
from pyringar.train import trainer as trainer_module

LINE = r"test acc: \d\.\d{2}, \d+\.\d sec/epoch on \[.*\]"


@pytest.fixture
def few_images(monkeypatch):
    """Makes every run short: a hundred images instead of thousands."""
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: garments(100, 50))


def parse(*arguments):
    parser = argparse.ArgumentParser()
    cli_train.add_parser(parser.add_subparsers())
    return vars(parser.parse_args(["train", "lenet", *arguments]))


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("lenet --ranks 4", "garments, 100 training and 50 test images"),
        ("lenet --devices cpu,cpu,cpu --weights 3,1,2 --allreduce ring", "shared 3:1:2"),
        ("lenet --init book --lr-schedule constant --momentum 0.9", "constant momentum 0.9, book"),
        ("lenet --no-overlap --bucket-cap-mb 0.1 --amp", "summed after backward"),
        (
            "resnet18 --width 4 --batchnorm sync",
            "ResNet-18 of width 4, sync batch norm, 44,738 parameters in 76 tensors",
        ),
    ],
)
def test_command_prints_choices_and_curve(capsys, options, words):
    assert main(["train", *options.split(), "--epochs", "2", "--batch-size", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert words in " ".join(" ".join(lines[:-4]).split())
    assert lines[-4].split() == ["epoch", "loss", "acc", "seconds"]
    rows = [line.split() for line in lines[-3:-1]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(len(row) == 4 and all(map(float, row)) for row in rows)
    assert re.fullmatch(LINE, lines[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "cuda:91"], "--devices[0] is 'cuda:91', which is not on this machine"),
        (["--ranks", "3", "--devices", "cpu,cpu"], "--ranks is 3, but devices names 2"),
        (["--weights", "1,2,3"], "--weights has 3 entries"),
        (["--plot", "curve.pdf"], "--plot is 'curve.pdf', expected"),
        (["--trace", "x.png"], "--trace is 'x.png', expected"),
        (["--log", "x.jsonl"], "--log is 'x.jsonl', expected"),
    ],
)
def test_wrong_values_exit_with_2(capsys, options, message):
    assert main(["train", "lenet", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "test acc" not in captured.out


@pytest.mark.parametrize("options", [["--weights", "auto"], ["--epochs", "x"], ["--gpus"]])
def test_unparsable_options_exit_with_2(capsys, options):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "lenet", *options])
    assert options[0] in capsys.readouterr().err


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No images where they are looked for by default, and no network."""
    monkeypatch.setattr("pyringar.train.data._synthetic", lambda: garments(60, 20))
    monkeypatch.setattr("pyringar.train.data.default_data_dir", lambda: tmp_path / "default")

    def fail(root):
        raise RingarError("no network")

    monkeypatch.setattr("pyringar.train.data._download", fail)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("options", [["--data-dir", "/nope"], ["--dataset", "fashion-mnist"]])
def test_missing_images_end_the_run(capsys, options):
    assert main(["train", "lenet", *options]) != 0
    captured = capsys.readouterr()
    assert options[1] in captured.err
    assert "train-images-idx3-ubyte" in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("offline")
def test_the_synthetic_set_is_announced(capsys, caplog):
    assert main(["train", "lenet", "--epochs", "1"]) == 0
    assert "NOT Fashion-MNIST but the built-in synthetic set, because" in caplog.text
    assert "garments, 60 training and 20 test images" in capsys.readouterr().out


def test_options_match_train_config():
    commands = argparse.ArgumentParser().add_subparsers()
    cli_train.add_parser(commands)
    actions = {action.dest: action for action in commands.choices["train"]._actions}
    defaults = {field.name: getattr(TrainConfig(), field.name) for field in fields(TrainConfig)}
    del defaults["dtype"]  # for code that checks gradients
    assert defaults.keys() <= actions.keys()
    defaults["ranks"] = TrainConfig().world_size
    for name, default in defaults.items():
        if default is not None and not isinstance(default, bool) and name != "model":
            assert f"({default})" in actions[name].help
    for name in config.CHOICES.keys() & actions.keys():
        assert tuple(actions[name].choices) == config.CHOICES[name]
    assert parse() == {"model": "lenet", "run": cli_train.run}, (
        "an option not given must not override a default"
    )


def test_lists_are_parsed():
    assert parse("--devices", "cuda:0, cpu")["devices"] == ("cuda:0", "cpu")
    assert parse("--weights", "3,1.5")["weights"] == (3.0, 1.5)


@pytest.mark.usefixtures("few_images")
def test_files_are_written_and_named(tmp_path, capsys):
    plot, trace = tmp_path / "p.png", tmp_path / "t.json"
    options = ["--plot", str(plot), "--trace", str(trace)]
    assert main(["train", "lenet", "--epochs", "1", *options]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:-1] == [f"plot       {plot}", f"trace      {trace}"]
    assert main(["trace", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LeNet on [cpu x 2 ranks]"
    assert lines[1].split()[2:] == ["forward", "backward", "bucket", "wait", "optimizer", "exposed"]
    assert all(float(cell) > 0 for cell in lines[2].split()[1:5])
