"""Test that training in shards has the same bits on any number of ranks and machines."""

import itertools
import re
import subprocess
import sys

import pytest
from case_marks import mostly_slow
from rank_processes import RankGroup
from sharded_runs import KINDS, MODELS, TEST, TRAIN, as_rank, in_one_process
from training_runs import garments, run, same_results

import pyringar as pr


def check(rows):
    first = next(iter(rows.values()))
    assert len(set(first)) == len(first), "two steps have equal bits, so nothing was learned"
    assert {name: row for name, row in rows.items() if row != first} == {}


@pytest.mark.parametrize(
    ("model", "kind"), mostly_slow(itertools.product(MODELS, KINDS), ("lenet", "float32"))
)
def test_sharded_training_ignores_rank_count(model, kind):
    options = {**MODELS[model], **KINDS[kind]}
    rows = {k: in_one_process(k, **options) for k in (1, 2, 8)}
    for machines in ("aa", "aaaa", "aabb"):
        with RankGroup(len(machines)) as group:
            for rank, row in enumerate(group.check(as_rank, machines, options)):
                rows[f"rank {rank} of {machines}"] = row
    check(rows)


@pytest.mark.parametrize("model", mostly_slow(MODELS, "lenet"))
def test_run_resumes_on_other_rank_count(tmp_path, model):
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


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["lenet", "resnet18 --width 4 --amp"])
def test_commands_print_equal_digests(model, monkeypatch):
    options = ["--shards", "8", "--batch-size", "500", "--momentum", "0.9", "--epochs", "1"]
    words = ["-m", "pyringar", "train", *model.split(), *options, "--dataset", "synthetic"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    found = set()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for start in (
        [*words, "--ranks", "1"],
        [*words, "--ranks", "8"],
        [*torchrun, "2", *words],
        [*torchrun, "4", *words],
    ):
        text = subprocess.check_output([sys.executable, *start], text=True, timeout=200)
        found.add(re.search(r"^digest +([0-9a-f]{14}),", text, re.M)[1])
    assert len(found) == 1
