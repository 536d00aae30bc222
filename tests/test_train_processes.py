"""Does training with one rank per process give the bits of one process that has all ranks?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch
from ranks import Crew
from training import garments, run

import pyringar as pr
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import TrainConfig, Trainer
from pyringar.train.group import Processes, num_processes

LENET = {"batch_size": 20, "epochs": 2}
RESNET = {"model": "resnet18", "width": 8, "batch_size": 16, "epochs": 2}


@pytest.fixture(scope="module")
def pool():
    made = Crew(2)
    yield made
    made.close()


def as_rank(rank, world_size, store, options):
    torch.set_num_threads(1)
    config = TrainConfig(ranks=world_size, **options)
    group = Processes(config, store, rank, world_size)
    with Trainer(config, garments(75, 30), group=group) as trainer:
        result = trainer.run()
    return result.curve, result.losses, result.params, result.state, str(result), group.digest


RUNS = {
    "lenet": LENET,
    "no image": {**LENET, "batch_size": 74},  # the last batch has one image: one rank has none
    "resnet18": RESNET,
}
MORE_RUNS = {
    "weights": {**LENET, "weights": (3, 1), "overlap": False},
    "float64": {
        **LENET,
        "batch_size": 37,
        "bucket_cap_mb": 0.01,
        "dtype": "float64",
        "init": "book",
    },
    "resnet18 no image": {**RESNET, "batch_size": 74, "bucket_cap_mb": 0.05, "epochs": 1},
    "amp": {**RESNET, "amp": True, "epochs": 1},
}


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in RUNS.items()),
        *(pytest.param(o, id=name, marks=pytest.mark.slow) for name, o in MORE_RUNS.items()),
    ],
)
def test_processes_have_bits_of_one_process(pool, options):
    alone = run(garments(75, 30), ranks=2, **options)
    answers = pool.check(as_rank, options)
    for curve, losses, params, state, line, digest in answers:
        assert curve == alone.curve
        assert losses == alone.losses
        check_replicas_equal([alone.params, params])
        assert list(state) == list(alone.state)
        check_replicas_equal([list(alone.state.values()), list(state.values())])
        assert line.endswith("on [cpu x 2 ranks]")
        assert digest == answers[0][-1] != ""


def diverge_as_rank(rank, world_size, store):
    config = TrainConfig(ranks=world_size, **LENET)
    group = Processes(config, store, rank, world_size)
    with Trainer(config, garments(75, 30), group=group) as trainer:
        if rank == 1:
            with torch.no_grad():
                trainer.replicas[0][4][5, 6] += 1e-3
        with pytest.raises(pr.RingarError) as caught:
            trainer.run()
    return str(caught.value)


def test_divergence_raises_on_all_ranks(pool):
    for text in pool.check(diverge_as_rank):
        assert "the parameters of ranks [1] differ from rank 0's" in text


def refused_as_rank(rank, world_size, store, options):
    config = TrainConfig(**{"ranks": world_size, **options})
    with pytest.raises(pr.ArgumentError) as caught:
        Processes(config, store, rank, world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 3}, "ranks is 3, but there are 2 processes"),
        ({"devices": ("cpu", "cpu")}, "devices is ('cpu', 'cpu'), which names the ranks of one"),
        ({"allreduce": "fused"}, "allreduce is 'fused', which needs all ranks in one process"),
        ({"model": "resnet18", "batchnorm": "sync"}, "batchnorm is 'sync'"),
    ],
)
def test_options_of_one_process_are_refused(pool, options, words):
    for text in pool.check(refused_as_rank, options):
        assert words in text


def load_as_rank(rank, world_size, store, outcome):
    """Every rank loads; the times tell who came first."""
    config = TrainConfig(ranks=world_size, **LENET)
    group = Processes(config, store, rank, world_size)
    times = []

    def load():
        times.append(time.monotonic())
        if rank == 0:
            time.sleep(0.3)
            if outcome == "fails":
                raise pr.UnsupportedError("no images here")
        times.append(time.monotonic())
        return garments(1, 1)

    try:
        group.load(load)
    except pr.RingarError as error:
        return type(error), str(error)
    return times


def test_rank_0_loads_first(pool):
    first, second = pool.check(load_as_rank, "works")
    assert first[1] <= second[0]
    first, second = pool.check(load_as_rank, "fails")
    assert first == (pr.UnsupportedError, "no images here")
    assert second[0] is pr.RingarError
    assert "rank 0 could not load the images: UnsupportedError: no images here" in second[1]


# -- the command -----------------------------------------------------------------------------------


def torchrun(*arguments, nproc=2, timeout_s=110):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    command += ["--standalone", "-m", "pyringar", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


@pytest.mark.slow  # its bits are those of the ranks above
def test_the_command_under_torchrun(tmp_path):
    plot, trace = tmp_path / "curve.png", tmp_path / "trace.json"
    options = ["--dataset", "synthetic", "--epochs", "1", "--batch-size", "1000"]
    done = torchrun("lenet", *options, "--plot", str(plot), "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("model ") for line in lines) == 1, "rank 0 alone prints"
    assert any(line == "devices    [cpu x 2 ranks], each a process" for line in lines)
    assert any(re.fullmatch(r"ranks +2 processes, equal parameters [0-9a-f]{14}", x) for x in lines)
    assert re.fullmatch(r"test acc: .* on \[cpu x 2 ranks\]", lines[-1])
    assert plot.stat().st_size > 1000
    assert trace.stat().st_size > 1000


@pytest.mark.parametrize(("text", "wanted"), [(None, 1), ("1", 1), ("4", 4), ("two", None)])
def test_torchrun_says_how_many_processes_there_are(monkeypatch, text, wanted):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("WORLD_SIZE", text)
    if wanted is not None:
        assert num_processes() == wanted
        return
    with pytest.raises(pr.ArgumentError, match="WORLD_SIZE is 'two'"):
        num_processes()
