"""Traces of training steps: what they record, their file, and their tables."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from training import garments

import pyringar as pr
from pyringar.cli import main
from pyringar.train import TrainConfig, Trainer
from pyringar.train.trace import CATEGORIES, Trace, covered_s

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


def test_save_and_load_roundtrip(trace, tmp_path):
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


def test_command_prints_table_and_json(trace, tmp_path, capsys):
    file, trace.title = tmp_path / "t.json", "a net, 2 ranks"
    trace.save(file)
    assert main(["trace", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == [trace.title, " step" + "".join(f" {name:>9}" for name in COLUMNS)]
    one = ["15.00", "4.00", "8.00", "8.00", "2.00", "1.00", "2.00"]  # 2 ms of buckets in the wait
    assert [line.split() for line in lines[2:6]] == [[n, *one] for n in ("0", "1", "2", "mean")]
    assert main(["trace", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == trace.title
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    assert [found["mean"][f"{name}_ms"] for name in COLUMNS] == pytest.approx(list(map(float, one)))


# -- who worked when -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("lenet", {"weights": (1, 0, 1)}),
        ("resnet18", {"width": 8, "batchnorm": "sync"}),
        ("lenet", {"shards": 6}),
    ],
)
def test_trainer_records_phases_of_all_ranks(model, options):
    config = TrainConfig(3, 20, epochs=1, model=model, **options)
    trace = Trace()
    with Trainer(config, garments(40, 10), trace=trace) as trainer:
        trainer.run()
    assert trace.steps() == [0, 1]
    for step in trace.steps():
        kinds = {(span.category, span.rank) for span in trace.of_step(step)}
        for kind in ("forward", "backward", "bucket", "optimizer"):
            assert {(kind, rank) for rank in range(3)} <= kinds
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


# -- files that are no traces ----------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 200
SPAN = b'{"ph":"X","name":"n","cat":"wait","pid":0,"ts":0,"dur":%s,"args":{"step":0,"bytes":0}}'
TRACE = b'{"otherData": {"title": ""}, "traceEvents": [%s]}'


MALFORMED = [
    (b"", "Expecting value"),
    (PNG, "UnicodeDecodeError"),
    (b"[]", "TypeError"),
    (b"{}", "otherData"),
    (TRACE % b"", "it holds no step"),
    (TRACE % b"{}", "KeyError: 'ph'"),
    (TRACE % (SPAN % b"1").replace(b"wait", b"lunch"), "category 'lunch', expected one of"),
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


def test_unreadable_file_raises(tmp_path):
    with pytest.raises(pr.ArgumentError, match=f"{tmp_path} cannot be read: Is a directory"):
        Trace.load(tmp_path)
