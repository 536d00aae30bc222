"""Does a trace hold what happened, survive its file, and show it to people?"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar.cli import main
from pyringar.train import resnet18
from pyringar.train.trace import CATEGORIES, Trace


@pytest.fixture
def trace():
    """Three steps of two ranks, in whole milliseconds."""
    made = Trace()
    phases = [("forward", 0, 4), ("backward", 4, 12), ("bucket", 6, 10), ("bucket", 10, 14)]
    phases += [("wait", 12, 14), ("optimizer", 14, 15)]
    for made.step in range(3):
        for rank, (kind, begin_ms, end_ms) in itertools.product(range(2), phases):
            at = made._begin_ns + made.step * 20_000_000
            times = at + begin_ms * 1_000_000, at + end_ms * 1_000_000
            made.add(kind, kind, rank, *times, nbytes=100 if kind == "bucket" else 0)
    return made


def test_a_file_holds_everything(trace, tmp_path):
    trace.save(tmp_path / "t.json")
    again = Trace.load(tmp_path / "t.json")
    assert len(again.spans) == len(trace.spans) == 36
    for ours, theirs in zip(again.spans, trace.spans, strict=True):
        assert replace(ours, begin_s=0, end_s=0) == replace(theirs, begin_s=0, end_s=0)
        assert ours.begin_s == pytest.approx(theirs.begin_s, abs=1e-9)
        assert ours.end_s == pytest.approx(theirs.end_s, abs=1e-9)


def test_the_file_is_what_perfetto_reads(trace, tmp_path):
    trace.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {(0, "rank 0"), (1, "rank 1"), (1, "computation"), (0, "buckets")} <= names
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["tid"] == (e["cat"] == "bucket") for e in spans)


def test_the_table_says_how_much_was_hidden(trace):
    lines = str(trace).splitlines()
    assert lines[0].split() == ["step", "ms", *CATEGORIES, "hidden"]
    # 8 ms of buckets, 2 of them under the wait.
    assert lines[1].split() == ["0", "15.00", "4.00", "8.00", "8.00", "2.00", "1.00", "75%"]
    assert len(lines) == 4


def test_the_command_prints_and_draws(trace, tmp_path, capsys):
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
    trace.save(file)
    assert main(["trace", str(file), "--timeline", str(picture), "--step", "1"]) == 0
    assert "75%" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["trace", str(file), "--timeline", str(picture), "--step", "9"]) != 0
    assert "step is 9, expected one of [0, 1, 2]" in capsys.readouterr().err


def test_a_picture_leaves_pyplot_alone(trace, tmp_path):
    """In a notebook the pictures after it must still appear there."""
    plt.switch_backend("svg")
    try:
        trace.plot(tmp_path / "t.png")
        assert plt.get_backend() == "svg"
        assert plt.get_fignums() == []
    finally:
        plt.switch_backend("Agg")


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{}]}', "[]"])
def test_other_files_are_refused(tmp_path, text, capsys):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(pr.ArgumentError, match=r"other\.json is no trace"):
        Trace.load(file)
    assert main(["trace", str(tmp_path / "missing.json")]) != 0
    assert "missing.json" in capsys.readouterr().err


def test_an_unknown_category_is_refused():
    with pytest.raises(pr.ArgumentError, match="category is 'lunch'"):
        Trace().add("a", "lunch", 0, 0, 1)


def test_buckets_of_a_real_step():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))]
    nets += [copy.deepcopy(nets[0])]
    trace = Trace()
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3, first_bucket_mb=1e-3) as bucketer:
        for rank, net in enumerate(nets):
            with trace.span("forward", rank):
                loss = net(torch.randn(4, 20)).square().sum()
            with trace.span("backward", rank):
                loss.backward()
        with trace.span("wait", 0):
            bucketer.wait()
        trace.add_buckets(bucketer.stats(), 2)
        count = len(bucketer.stats().buckets)
    buckets = [span for span in trace.spans if span.category == "bucket"]
    assert len(buckets) == 2 * count
    last = max(s.end_s for s in trace.spans if s.category == "wait")
    first = min(s.begin_s for s in trace.spans if s.category == "backward")
    assert all(first <= s.begin_s <= s.end_s <= last for s in buckets)


def test_the_first_bucket_of_a_resnet_leaves_before_half_of_its_backward():
    nets = [resnet18(width=8, seed=0) for _ in range(2)]
    images = [torch.randn(16, 1, 28, 28) for _ in nets]
    shares = []
    with pr.GradientBucketer(nets, bucket_cap_mb=0.1, first_bucket_mb=0.05) as bucketer:
        for _ in range(4):
            trace = Trace()
            losses = [net(x).square().sum() for net, x in zip(nets, images, strict=True)]
            begin_ns = time.perf_counter_ns()
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            trace.add("backward", "backward", 0, begin_ns, time.perf_counter_ns())
            bucketer.wait()
            trace.add_buckets(bucketer.stats(), 2)
            backward = next(s for s in trace.spans if s.category == "backward")
            first = min(s.begin_s for s in trace.spans if s.category == "bucket")
            shares.append((first - backward.begin_s) / (backward.end_s - backward.begin_s))
    assert min(shares) < 0.5, shares
