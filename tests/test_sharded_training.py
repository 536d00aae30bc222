"""Training in shards: are all bits equal after every step on 1, 2, 4, 8 ranks, wherever they are?

Prints the digests (`pytest -s`): a row per configuration, a column per step.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from cases import mostly_slow
from ranks import Crew
from sharded_runs import KINDS, MODELS, TEST, TRAIN, as_rank, in_one_process, table
from training import garments, run, same_results

import pyringar as pr
from pyringar.parallel import sharded_step
from pyringar.train import load_data

PLACES = {"2 processes": "aa", "4 processes": "aaaa", "2 machines of 2": "aabb"}


@pytest.fixture(scope="module")
def crews():
    made = {k: Crew(k) for k in (2, 4)}
    yield made
    for crew in made.values():
        crew.close()


def check(rows):
    print(f"\n{table(rows)}")
    first = next(iter(rows.values()))
    assert len(set(first)) == len(first), "two steps with equal bits: nothing was learned"
    assert {name for name, row in rows.items() if row != first} == set()


@pytest.mark.parametrize(
    ("model", "kind"), mostly_slow(itertools.product(MODELS, KINDS), ("lenet", "float32"))
)
def test_the_bits_of_any_number_of_ranks(crews, model, kind):
    options = {**MODELS[model], **KINDS[kind]}
    rows = {f"{model} {kind}, {k} ranks": in_one_process(k, **options) for k in (1, 2, 8)}
    for place, machines in PLACES.items():
        answers = crews[len(machines)].check(as_rank, machines, options)
        assert all(answer == answers[0] for answer in answers), place
        rows[place] = answers[0]
    check(rows)


MORE = {
    "6 shards on 3 ranks": ((1, 3, 6), {"shards": 6}),
    "16 shards": ((1, 4, 16), {"shards": 16, "batch_size": 33}),
    "1 shard": ((1,), {"shards": 1}),
    "float64": ((1, 4), {"dtype": "float64"}),
    "without momentum": ((1, 4), {"momentum": 0.0, "lr_schedule": "constant"}),
    "width 8, 2 epochs": ((1, 8), {"epochs": 2, "batch_size": 64}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [*itertools.product(MODELS, MORE)])
def test_more_shards_and_dtypes(model, name):
    ranks, options = MORE[name]
    options = {**MODELS[model], **options}
    if "width" in name and model == "resnet18":
        options["width"] = 8
    data = garments(150, TEST) if "epochs" in options else garments(TRAIN, TEST)
    threads = torch.get_num_threads()
    rows = {}
    for k in ranks:
        torch.set_num_threads(1 + k % 2)
        rows[f"{model} {name}, {k} ranks"] = in_one_process(k, data, **options)
    torch.set_num_threads(threads)
    check(rows)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_an_epoch_of_real_images(real_data_dir, model):
    data = load_data("fashion-mnist", real_data_dir)
    check(
        {f"{k} ranks": in_one_process(k, data, batch_size=256, **MODELS[model]) for k in (1, 2, 8)}
    )


# -- mistakes that it must catch -------------------------------------------------------------------


_reduce = pr.Communicator.all_reduce_coalesced


def rank_order(comm, lists, order):
    _reduce(comm, lists, order="rank")


def left_fold(run, shards):
    total = run(shards[0])
    for shard in shards[1:]:
        torch._foreach_add_(total, run(shard))
    return total


MISTAKES = {
    "ranks are folded": (pr.Communicator, "all_reduce_coalesced", rank_order),
    "shards are folded": (sharded_step, "_sum_tree", left_fold),
    "rank 0's running statistics": (sharded_step._Rank, "buffers", []),
    "statistics go from shard to shard": (sharded_step._Rank, "restore", lambda rank: None),
}


@pytest.mark.parametrize("name", mostly_slow(MISTAKES, "ranks are folded"))
def test_planted_mistake_is_caught(name, two_torch_threads):
    options = MODELS["lenet" if "folded" in name else "resnet18"]
    right = in_one_process(1, **options)
    with mock.patch.object(*MISTAKES[name]):
        rows = {f"{k} ranks": in_one_process(k, **options) for k in (1, 4)}
    print(f"\n{name}\n{table({'right': right, **rows})}")
    assert rows["4 ranks"] != rows["1 ranks"]


def test_plain_run_depends_on_ranks():
    losses = {k: in_one_process(k, shards=None)[-2] for k in (1, 2)}
    assert losses[1] != losses[2]


# -- going on, options, the command ----------------------------------------------------------------


@pytest.mark.parametrize("model", mostly_slow(MODELS, "lenet"))
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, model):
    options = {"shards": 4, "momentum": 0.9, "batch_size": 20, "lr_schedule": "constant"}
    options |= MODELS[model]
    data = garments(TRAIN, TEST)

    whole = run(data, ranks=1, epochs=3, **options)
    run(data, ranks=4, epochs=1, save=tmp_path / "run", **options)
    run(data, ranks=1, epochs=2, resume=tmp_path / "run", **options)
    same_results(run(data, ranks=2, epochs=3, resume=tmp_path / "run", **options), whole)
    for name, value, words in (
        ("shards", 8, r"shards is 8, but the checkpoint has 4"),
        ("momentum", 0.5, r"momentum is 0\.5, but the checkpoint has 0\.9"),
    ):
        with pytest.raises(pr.ArgumentError, match=words):
            run(data, ranks=2, epochs=3, resume=tmp_path / "run", **{**options, name: value})


def command(*arguments, processes=1):
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["-m", "pyringar", "train", *arguments, "--dataset", "synthetic", "--epochs", "1"]
    done = subprocess.run(
        [*start, *words], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["lenet", "resnet18 --width 4 --amp"])
def test_the_command_prints_the_digest_that_any_ranks_get(model):
    options = [*model.split(), "--shards", "8", "--batch-size", "500", "--momentum", "0.9"]
    texts = [command(*options, "--ranks", str(k)) for k in (1, 8)]
    texts += [command(*options, processes=k) for k in (2, 4)]
    found = {re.search(r"^digest +([0-9a-f]{14}),", text, re.M)[1] for text in texts}
    lines = {re.search(r"^ +1 +(\S+ +\S+)", text, re.M)[1] for text in texts}
    print(found, lines)
    assert len(found) == len(lines) == 1
    assert "8 of every batch, 1 on every rank, computed one by one" in texts[1]
