"""Does training with one rank per process give the bits of one process that has all ranks?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch
from cases import mostly_slow
from ranks import Crew
from training import garments, run, same_results

import pyringar as pr
from pyringar.train import TrainConfig, Trainer
from pyringar.train.group import Processes, num_processes

LENET = {"batch_size": 20, "epochs": 2}
RESNET = {"model": "resnet18", "width": 8, "batch_size": 16, "epochs": 2}


@pytest.fixture(scope="module")
def pool():
    made = Crew(2)
    yield made
    made.close()


def as_rank(rank, world_size, store, options, folders):
    torch.set_num_threads(1)
    config = TrainConfig(ranks=world_size, **options)
    group = Processes(config, store, rank, world_size)
    with Trainer(config, garments(75, 30), group=group, **folders) as trainer:
        return trainer.run(), group.digest


RUNS = [
    LENET,
    {**LENET, "batch_size": 74},  # the last batch has one image: one rank has none
    RESNET,
]
BOOK = {"batch_size": 37, "bucket_cap_mb": 0.01, "dtype": "float64", "init": "book"}
MORE_RUNS = [
    {**LENET, "weights": (3, 1), "overlap": False},
    {**LENET, **BOOK},
    {**RESNET, "batch_size": 74, "bucket_cap_mb": 0.05, "epochs": 1},
    {**RESNET, "amp": True, "epochs": 1},
]


@pytest.mark.parametrize("options", mostly_slow([*RUNS, *MORE_RUNS], *RUNS), ids=str)
def test_processes_have_bits_of_one_process(pool, options):
    alone = run(garments(75, 30), ranks=2, **options)
    answers = pool.check(as_rank, options, {})
    for result, digest in answers:
        same_results(result, alone)
        assert str(result).endswith("on [cpu x 2 ranks]")
        assert digest == answers[0][1] != ""


@pytest.mark.parametrize("options", [LENET, {**RESNET, "weights": (3, 1)}], ids=str)
def test_resume_in_processes_and_back(pool, tmp_path, options):
    options = {**options, "lr_schedule": "constant", "momentum": 0.9}
    data, first = garments(75, 30), {**options, "epochs": 1}
    whole = run(data, ranks=2, **options)
    there, back = tmp_path / "there", tmp_path / "back"
    run(data, ranks=2, save=there, **first)
    for result, _ in pool.check(as_rank, options, {"resume": there}):
        same_results(result, whole)
    pool.check(as_rank, first, {"save": back})
    same_results(run(data, ranks=2, resume=back, **options), whole)


def unusable_as_rank(rank, world_size, store, folders):
    config = TrainConfig(ranks=world_size, **LENET)
    group = Processes(config, store, rank, world_size)
    with pytest.raises(pr.RingarError) as caught:
        Trainer(config, garments(75, 30), group=group, **folders)
    group.close()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["save", "resume"])
def test_unusable_folder_raises_on_all_ranks(pool, tmp_path, name):
    first, second = pool.check(unusable_as_rank, {name: tmp_path / "no" / "where"})
    assert first[0] is pr.ArgumentError
    assert f"{name} is '{tmp_path}/no/where'" in first[1]
    assert second[0] is pr.PeerLostError


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


@pytest.mark.slow  # its bits are those of the ranks above
def test_the_command_under_torchrun(tmp_path):
    plot, trace = tmp_path / "curve.png", tmp_path / "trace.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "pyringar", "train", "lenet", "--dataset", "synthetic"]
    command += ["--epochs", "1", "--batch-size", "1000", "--plot", str(plot)]
    done = subprocess.run(
        [*command, "--trace", str(trace)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("model ") for line in lines) == 1, "rank 0 alone prints"
    assert any(line == "devices    [cpu x 2 ranks], each a process" for line in lines)
    assert any(re.fullmatch(r"ranks +2 processes, equal parameters [0-9a-f]{14}", x) for x in lines)
    assert re.fullmatch(r"test acc: .* on \[cpu x 2 ranks\]", lines[-1])
    assert min(plot.stat().st_size, trace.stat().st_size) > 1000


def test_torchrun_sets_number_of_processes(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_processes() == 4
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(pr.ArgumentError, match="WORLD_SIZE is 'two'"):
        num_processes()
