"""Test that training with one rank per process has the bits of one process with all ranks."""

from __future__ import annotations

import time

import pytest
import torch
from case_marks import mostly_slow
from rank_processes import RankGroup
from training_runs import garments, run, same_results

import pyringar as pr
from pyringar.train import TrainConfig, Trainer
from pyringar.train.train_group import ProcessTrainGroup, num_processes

LENET = {"batch_size": 20, "epochs": 2}
RESNET = {"model": "resnet18", "width": 8, "batch_size": 16, "epochs": 2}


@pytest.fixture(scope="module")
def pool():
    made = RankGroup(2)
    yield made
    made.close()


def as_rank(rank, world_size, store, options, folders):
    torch.set_num_threads(1)
    config = TrainConfig(ranks=world_size, **options)
    group = ProcessTrainGroup(config, store, rank, world_size)
    with Trainer(config, garments(75, 30), group=group, **folders) as trainer:
        return trainer.run(), group.digest


RUNS = [
    LENET,
    {**LENET, "batch_size": 74},  # the last batch has one image: one rank has no image
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
def test_rank_processes_match_one_process(pool, options):
    alone = run(garments(75, 30), ranks=2, **options)
    answers = pool.check(as_rank, options, {})
    for result, digest in answers:
        same_results(result, alone)
        assert str(result).endswith("on [cpu x 2 ranks]")
        assert digest == answers[0][1] != ""


@pytest.mark.parametrize(
    "options", mostly_slow([LENET, {**RESNET, "weights": (3, 1)}], LENET), ids=str
)
def test_resume_works_across_process_counts(pool, tmp_path, options):
    options = {**options, "lr_schedule": "constant", "momentum": 0.9}
    data, first = garments(75, 30), {**options, "epochs": 1}
    whole = run(data, ranks=2, **options)
    there, back = tmp_path / "there", tmp_path / "back"
    run(data, ranks=2, save=there, **first)
    for result, _ in pool.check(as_rank, options, {"resume": there}):
        same_results(result, whole)
    pool.check(as_rank, first, {"save": back})
    same_results(run(data, ranks=2, resume=back, **options), whole)


def unusable_as_rank(rank, world_size, store, folder):
    config = TrainConfig(ranks=world_size, **LENET)
    group = ProcessTrainGroup(config, store, rank, world_size)
    with pytest.raises(pr.RingarError) as caught:
        Trainer(config, garments(75, 30), group=group, resume=folder)
    group.close()
    return type(caught.value), str(caught.value)


def test_unusable_folder_raises_on_all_ranks(pool, tmp_path):
    first, second = pool.check(unusable_as_rank, tmp_path / "no")
    assert first[0] is pr.ArgumentError
    assert f"resume is '{tmp_path}/no'" in first[1]
    assert second[0] is pr.PeerLostError


def diverge_as_rank(rank, world_size, store):
    config = TrainConfig(ranks=world_size, **LENET)
    group = ProcessTrainGroup(config, store, rank, world_size)
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
        ProcessTrainGroup(config, store, rank, world_size)
    return str(caught.value)


def test_single_process_options_raise(pool):
    for options, words in [
        ({"ranks": 3}, "ranks is 3, but there are 2 processes"),
        (
            {"devices": ("cpu", "cpu")},
            "devices is ('cpu', 'cpu'), which is for ranks in one process",
        ),
        ({"allreduce": "fused"}, "allreduce is 'fused', which needs all ranks in one process"),
        ({"model": "resnet18", "batchnorm": "sync"}, "batchnorm is 'sync'"),
    ]:
        assert all(words in text for text in pool.check(refused_as_rank, options))


def load_as_rank(rank, world_size, store, outcome):
    config = TrainConfig(ranks=world_size, **LENET)
    group = ProcessTrainGroup(config, store, rank, world_size)
    times = []

    def load():
        times.append(time.monotonic())
        if rank == 0:
            time.sleep(0.3)
            if outcome == "fails":
                raise pr.UnsupportedError("no images here")
        times.append(time.monotonic())

    try:
        group.load(load)
    except pr.RingarError as error:
        return type(error), str(error)
    return times


def test_rank_0_loads_images_first(pool):
    first, second = pool.check(load_as_rank, "works")
    assert first[1] <= second[0]
    first, second = pool.check(load_as_rank, "fails")
    assert first == (pr.UnsupportedError, "no images here")
    assert second[0] is pr.RingarError
    assert "rank 0 could not load the images: UnsupportedError: no images here" in second[1]


def test_num_processes_reads_world_size_variable(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_processes() == 4
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(pr.ArgumentError, match="WORLD_SIZE is 'two'"):
        num_processes()
