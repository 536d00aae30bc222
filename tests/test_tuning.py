"""Does `auto` follow the table: the shipped one, or the one that was measured here?"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import assert_bits, expected, inputs
from ranks import changed_environment, new_name

import pyringar as pr
from pyringar.cli import main
from pyringar.comm import communicator, tuner, tuning
from pyringar.comm.topology import Topology
from pyringar.engine import load as _native

KIB, MIB = 2**10, 2**20


def table(*choices: tuple[int, str], world_size: int | None = 4, **fields) -> dict:
    """A file for CPU ranks of one process."""
    rows = [{"from_bytes": b, "algorithm": a, "why": f"for {a}"} for b, a in choices]
    entry = {"place": "host", "device": None, "world_size": world_size, "order": None}
    entry |= {"choices": rows} | fields
    return {"version": 1, "date": "2000-01-01", "machine": tuning.machine(), "tables": [entry]}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(content)``: the table that this machine has, for this test."""

    def write(content: object) -> Path:
        path = tmp_path / "table.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv("PYRINGAR_TUNING", str(path))
        return path

    return write


# -- the shipped table -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["any", "rank"])
@pytest.mark.parametrize(("place", "algorithms"), tuning.ALGORITHMS.items())
def test_the_shipped_table_covers_every_place(place, algorithms, order):
    choices = tuning.shipped(place, order)
    assert set(choices.algorithms) <= set(algorithms)
    if order == "rank":
        assert "ring" not in choices.algorithms


def test_the_shipped_table_is_what_documents_say():
    assert tuning.shipped("host", "any").rule == "fused"
    assert tuning.shipped("gpu", "rank").rule == "fused"
    assert tuning.shipped("gpus", "rank").rule == "direct"
    assert tuning.shipped("mixed", "any").rule == "direct"
    between = tuning.shipped("gpus", "any")
    assert between.rule == ("direct", 512 * KIB, "ring")
    assert between.at(512 * KIB - 1)[0] == "direct"
    assert between.at(512 * KIB)[0] == "ring"
    with pytest.raises(pr.ArgumentError, match="place is 'moon'"):
        tuning.shipped("moon", "any")


@pytest.mark.parametrize(
    ("devices", "place"),
    [
        (["cpu", "cpu"], "host"),
        (["cuda:0", "cuda:0"], "gpu"),
        (["cuda:0", "cuda:1"], "gpus"),
        (["cpu", "cuda:0"], "mixed"),
    ],
)
def test_places(devices, place):
    assert Topology.of([torch.device(d) for d in devices]).place == place


# -- a measured one --------------------------------------------------------------------------------


def test_auto_takes_what_the_table_says(install, make_comm):
    install(table((0, "fused"), (4000, "direct")))
    comm = make_comm(4)
    small, large = (inputs(n, torch.float32, 4) for n in (999, 1000))
    for parts, algorithm in ((small, "fused"), (large, "direct")):
        before = comm.stats().get(algorithm, {"calls": 0})["calls"]
        ranks = [p.clone() for p in parts]
        comm.all_reduce(ranks)
        assert comm.stats()[algorithm]["calls"] == before + 1
        for rank in ranks:
            assert_bits(rank, expected(parts, "sum", algorithm), algorithm)
        plan = comm.plan(parts[0].numel() * 4)
        assert (plan.algorithm, plan.reason) == (algorithm, f"for {algorithm}")
    # Lists count all their bytes, and what is named is taken.
    comm.all_reduce_coalesced([[s, p] for s, p in zip(small, large, strict=True)])
    comm.bind(large)()
    assert comm.stats()["direct"]["calls"] == 3
    comm.all_reduce(large, algorithm="fused")
    assert comm.stats()["fused"]["calls"] == 2


@pytest.mark.parametrize("numel", [998, 1000])
def test_other_collectives_count_one_ranks_whole_buffer(install, make_comm, numel):
    install(table((0, "fused"), (4000, "direct"), world_size=2))
    comm = make_comm(2)
    wholes = inputs(numel, torch.float32, 2)
    parts = [torch.empty(numel // 2) for _ in range(2)]
    comm.reduce_scatter(parts, wholes)
    gathered = [torch.empty(numel) for _ in range(2)]
    comm.all_gather(gathered, parts)
    for whole in gathered:
        assert_bits(whole, expected(wholes, "sum", "fused"), "both")
    algorithm = "fused" if numel < 1000 else "direct"
    assert {name: row["calls"] for name, row in comm.stats().items()} == {algorithm: 2}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("fused", 5), "name, bytes, name"),
        ((), "name, bytes, name"),
        (("fused", "5", "ring"), "name, bytes, name"),
        (("fused", 5, "naive"), "'naive', expected one of fused, direct, ring"),
        (["fused"], "expected one of fused, direct, ring"),
    ],
)
def test_the_engine_refuses_what_is_no_rule(rule, message):
    group = _native.engine().Group(2, 5.0)
    tensors = [torch.ones(3) for _ in range(2)]
    with pytest.raises(pr.ArgumentError, match=message):
        group.all_reduce(tensors, "sum", rule, None)
    with pytest.raises(OverflowError):
        group.all_reduce(tensors, "sum", ("fused", -1, "ring"), None)
    assert all((t == 1).all() for t in tensors)
    group.close()


def test_allreduce_follows_the_table(install, monkeypatch):
    install(table((0, "fused"), (4000, "direct"), world_size=None))
    default = communicator._Default()
    monkeypatch.setattr(communicator, "_default", default)
    for numel in (999, 1000, 7):
        parts = inputs(numel, torch.float32, 3)
        ranks = [p.clone() for p in parts]
        pr.allreduce(ranks)
        for rank in ranks:
            assert_bits(rank, expected(parts, "sum", "fused"), "allreduce")
    (found,) = default._communicators.values()
    assert {name: row["calls"] for name, row in found.stats().items()} == {"fused": 2, "direct": 1}
    with pytest.raises(pr.ArgumentError, match="empty"):
        pr.allreduce([])
    default._close()


@pytest.mark.parametrize(
    ("world_size", "nearest"), [(1, 2), (2, 2), (3, 4), (5, 4), (6, 8), (64, 8)]
)
def test_the_nearest_number_of_ranks_counts(world_size, nearest):
    tables = [
        table((0, "direct" if k == nearest else "fused"), world_size=k)["tables"][0]
        for k in (2, 4, 8)
    ]
    content = table((0, "fused")) | {"tables": tables}
    found = tuning.parse_table(content).find("host", world_size, "any", None)
    assert found.rule == "direct"


def test_other_gpus_count_nothing():
    content = table((0, "ring"), place="gpus", order="any", device="Some GPU")
    parsed = tuning.parse_table(content)
    assert parsed.find("gpus", 4, "any", "Some GPU").rule == "ring"
    assert parsed.find("gpus", 4, "any", "Another GPU") is None
    assert parsed.find("gpus", 4, "rank", "Some GPU") is None


def test_a_place_without_a_table_has_the_shipped_one(install):
    install(table((0, "direct")))
    assert tuning.choices("host", 4, "any").rule == "direct"
    assert tuning.choices("gpus", 4, "any") == tuning.shipped("gpus", "any")


BAD = {
    "version is 2": table((0, "fused")) | {"version": 2},
    "version is None": {},
    "version is 3": 3,
    "Expecting value": "no JSON",
    "measured on": table((0, "fused")) | {"machine": {"cpu": "another", "cores": 1}},
    "date is 7": table((0, "fused")) | {"date": 7},
    "tables is None": table((0, "fused")) | {"tables": None},
    "has no 'choices'": table((0, "fused")) | {"tables": [{"place": "host"} | dict.fromkeys(
        ("order", "world_size", "device"))]},
    "is for 'moon'": table((0, "fused"), place="moon"),
    "in order 'best'": table((0, "fused"), order="best"),
    "for 0 ranks": table((0, "fused"), world_size=0),
    "'ring' is not among": table((0, "ring")),  # not in rank order
    "'fast' is not among": table((0, "fast"), order="any"),
    "begin at \\[1\\]": table((1, "fused")),
    "begin at \\[0, 9, 5\\]": table((0, "fused"), (9, "direct"), (5, "fused")),
    "begin at \\[\\]": table(),
    "no list of choices": table(choices=7),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_a_table_that_cannot_be_used_is_told_of_and_not_used(words, install, caplog):
    path = install(BAD[words])
    with caplog.at_level(logging.WARNING, "pyringar"):
        assert tuning.choices("host", 4, "any") == tuning.shipped("host", "any")
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "pyringar tune" in record.getMessage()
    with pytest.raises(ValueError, match=words):
        tuning.parse_table(json.loads(path.read_text()))


def test_a_named_table_that_is_not_there_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PYRINGAR_TUNING", str(tmp_path / "none.json"))
    with pytest.raises(pr.ArgumentError, match=r"none\.json.*where nothing is"):
        pr.Communicator(["cpu"] * 2)


def test_shipped_ignores_what_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PYRINGAR_TUNING")
    tuning.path().write_text(json.dumps(table((0, "direct"))))
    assert tuning.choices("host", 4, "any").rule == "direct"
    assert tuning.describe() == "of `pyringar tune`, 2000-01-01"
    monkeypatch.setenv("PYRINGAR_TUNING", "shipped")
    assert tuning.choices("host", 4, "any").rule == "fused"
    assert tuning.describe() == "shipped"


# -- processes: all must choose alike --------------------------------------------------------------


def on_rank_follow(state: SimpleNamespace, name: str, paths: list[str]) -> str:
    with changed_environment({"PYRINGAR_TUNING": paths[state.rank]}):
        comm = pr.ProcessCommunicator(state.store, state.rank, state.world_size, name=name)
    with comm:
        parts = inputs(5000, torch.float32, state.world_size)
        mine = parts[state.rank].clone()
        comm.all_reduce(mine)
        assert_bits(mine, expected(parts, "sum", "ring"), "ring")
        assert comm.stats()["ring"]["calls"] == 1
        small = parts[state.rank][:10].clone()
        comm.all_reduce(small)
        comm.all_reduce(mine, order="rank")
        assert comm.stats()["ring"]["calls"] == 1
        return comm.plan(20000).reason


@pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")
def test_processes_follow_the_table_of_rank_0(crew_of, tmp_path):
    paths = []
    for rank, rows in enumerate([((0, "direct"), (20000, "ring")), ((0, "ring"),), ((0, "ring"),)]):
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps(table(*rows, place="processes", order="any")))
        paths.append(str(path))
    paths[2] = "shipped"
    reasons = crew_of(3).run(on_rank_follow, name=new_name(), paths=paths)
    assert reasons == ["for ring"] * 3


# -- from measurements to a table ------------------------------------------------------------------


def samples_of(case: tuner.Case, seconds: list[dict[str, float]]) -> list[tuner.Sample]:
    return [tuner.Sample(case, n, s) for n, s in zip(case.sizes_bytes, seconds, strict=True)]


def test_the_fastest_is_taken_from_half_way_on():
    case = tuner.Case("host", 2, (1000, 4000, 16000))
    seconds = [
        {"fused": 1e-6, "direct": 9e-6, "ring": 5e-6},
        {"fused": 2e-6, "direct": 1.96e-6, "ring": 9e-6},  # not worth a change
        {"fused": 9e-6, "direct": 8e-6, "ring": 4e-6},
    ]
    parsed = tuning.parse_table(tuner.table_of(samples_of(case, seconds)))
    anyhow, ranked = (parsed.find("host", 2, order, None) for order in ("any", "rank"))
    assert [anyhow.at(n)[0] for n in (0, 1000, 7999, 8000, 10**9)] == [
        *("fused", "fused", "fused", "ring", "ring")
    ]
    assert [ranked.at(n)[0] for n in (0, 7999, 8000)] == ["fused", "fused", "direct"]
    assert "16000 bytes on 2 ranks: fused 9.0 us, direct 8.0 us, ring 4.0 us" in anyhow.at(16000)[1]
    assert "ring 4" not in ranked.at(16000)[1]


def test_auto_is_near_the_best_wherever_it_was_measured():
    draw = random.Random(5)
    for _ in range(200):
        place = draw.choice(["host", "gpu", "gpus", "processes"])
        names = tuning.algorithms_for(place, "any")
        case = tuner.Case(place, 4, tuple(4**i for i in range(1, 8)))
        samples = samples_of(
            case, [{name: draw.uniform(1e-6, 2e-6) for name in names} for _ in case.sizes_bytes]
        )
        parsed = tuning.parse_table(tuner.table_of(samples))
        for order in ("any", "rank"):
            allowed = tuning.algorithms_for(place, order)
            for sample in samples:
                chosen, _ = parsed.find(place, 4, order, None).at(sample.nbytes)
                best_s = min(sample.seconds[name] for name in allowed)
                assert sample.seconds[chosen] <= 1.1 * best_s


def test_what_cannot_be_measured_here_is_left_out():
    cases = tuner.plan_cases(("host", "processes", "gpu", "gpus"), (4, 2, 2), (64, 4))
    assert [(c.place, c.world_size) for c in cases if not c.device_name] == [
        *(("host", 2), ("host", 4), ("processes", 2), ("processes", 4))
    ]
    assert all(c.sizes_bytes == (4, 64) for c in cases)
    num_gpus = torch.cuda.device_count()
    assert all(c.world_size <= num_gpus for c in cases if c.place == "gpus")
    assert bool(num_gpus) == any(c.place == "gpu" for c in cases)


def test_cpu_ranks_are_measured():
    case = tuner.Case("host", 2, (4, 4096), ("cpu",) * 2)
    for sample in tuner.measure(case, rounds=2):
        assert set(sample.seconds) == {"fused", "direct", "ring"}
        assert all(0 < s < 1 for s in sample.seconds.values())


@pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")
def test_processes_are_measured():
    # From a script, as users do: spawned processes import the module that called.
    script = (
        "from pyringar.comm import tuner\n"
        "if __name__ == '__main__':\n"
        "    case = tuner.Case('processes', 2, (4, 4096))\n"
        "    for sample in tuner.measure(case, rounds=2):\n"
        "        print(sample.nbytes, *sorted(sample.seconds))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "4 direct ring\n4096 direct ring\n"), done.stderr


class Pipe:
    """What the parent of the ranks reads from."""

    def __init__(self, *messages: object) -> None:
        self.messages = list(messages)

    def poll(self, seconds: float) -> bool:
        return bool(self.messages)

    def recv(self) -> object:
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message


def test_ranks_that_fail_are_told_of():
    assert tuner._receive(Pipe({"ring": 1.0})) == {"ring": 1.0}
    for pipe, words in (
        (Pipe("rank 1: PeerLostError: gone"), "rank 1: PeerLostError: gone"),
        (Pipe(EOFError()), "died"),
        (Pipe(), "said nothing"),
    ):
        with pytest.raises(pr.RingarError, match=words):
            tuner._receive(pipe)


# -- the command -----------------------------------------------------------------------------------


def test_tune_writes_what_auto_then_follows(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PYRINGAR_TUNING")
    command = ["tune", "--places", "host", "--ranks", "2", "--sizes", "4KiB,64B", "--rounds", "2"]
    assert main(command) == 0
    written = capsys.readouterr().out
    assert f"written to {tuning.path()}" in written
    assert [line.split()[:3] for line in written.splitlines()[1:3]] == [
        *(["host", "2", "64"], ["host", "2", "4"])
    ]
    assert os.stat(tuning.path().parent).st_mode & 0o777 == 0o700
    with pr.Communicator(["cpu"] * 2) as comm:
        assert "pyringar tune measured here" in comm.plan(4096).reason
    assert main(["tune", "--show"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["version"] == 1
    assert main(["tune", "--reset"]) == 0
    assert not tuning.path().exists()
    assert "deleted" in capsys.readouterr().out
    for option in ("--reset", "--show"):
        assert main(["tune", option]) == 0
        assert "there is no table" in capsys.readouterr().out


def test_tune_says_where_else_it_wrote(tmp_path, capsys):
    out = tmp_path / "table.json"
    command = ["tune", "--places", "host", "--ranks", "2", "--sizes", "4B", "--rounds", "1"]
    assert main([*command, "--out", str(out)]) == 0
    assert f"set PYRINGAR_TUNING={out}" in capsys.readouterr().out
    tuning.parse_table(json.loads(out.read_text()))
    assert main([*command, "--out", str(tmp_path / "table.json" / "no")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--places", "host,moon", "'moon' is none of host"),
        ("--ranks", "2,x", "'x' is no number"),
        ("--ranks", "0", "'0' is no number"),
        ("--sizes", "3B", "no positive number of 4-byte"),
        ("--sizes", "0", "no positive number of 4-byte"),
        ("--sizes", "4kb", "'4kb' is no size"),
        ("--rounds", "-1", "'-1' is no number"),
    ],
)
def test_tune_refuses(option, value, words, capsys):
    with pytest.raises(SystemExit) as error:
        main(["tune", f"{option}={value}"])
    assert error.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs to measure")
def test_tune_without_gpus_says_so(capsys):
    assert main(["tune", "--places", "gpu,gpus"]) == 1
    assert "nothing to measure" in capsys.readouterr().err
