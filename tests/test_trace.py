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
from matplotlib.figure import Figure
from torch import nn

import pyringar as pr
from pyringar.cli import main
from pyringar.train import TrainConfig, Trainer, resnet18
from pyringar.train.data import ImageData
from pyringar.train.spans import covered_s
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
            name = {6: "bucket 0", 10: "bucket 1"}.get(begin_ms, kind)
            made.add(name, kind, rank, *times, nbytes=100 if kind == "bucket" else 0)
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
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["step", "ms", *CATEGORIES[:-1], "hidden"]
    # 8 ms of buckets, 2 of them under the wait.
    one = ["15.00", "4.00", "8.00", "8.00", "2.00", "1.00", "75%"]
    assert lines[1].split() == ["0", *one]
    assert lines[4].split() == ["mean", *one]
    assert lines[5].split() == ["total", "45.00", "12.00", "24.00", "24.00", "6.00", "3.00", "75%"]
    assert lines[7].split() == ["bytes", "begins,", "ms", "ms", "hidden"]
    assert lines[8].split() == ["bucket", "0", "100", "6.00", "4.000", "100%"]
    assert lines[9].split() == ["bucket", "1", "100", "10.00", "4.000", "50%"]
    assert {"bucket", "hidden"} <= {line.split(":")[0] for line in lines[11:]}, "words explained"


def test_the_command_prints_and_draws(trace, tmp_path, capsys):
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
    trace.save(file)
    assert main(["trace", str(file), "--timeline", str(picture), "--step", "1"]) == 0
    assert "75%" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(pr.ArgumentError, match=r"step is 9, expected one of \[0, 1, 2\]"):
        trace.plot(picture, 9)


def test_json_is_one_document_with_the_same_numbers(trace, tmp_path, capsys):
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
    trace.title = "a net, 2 ranks"
    trace.save(file)
    assert main(["trace", str(file), "--json", "--timeline", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert picture.exists()
    assert found["title"] == "a net, 2 ranks"
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    assert found["mean"]["backward_ms"] == pytest.approx(8)
    assert found["total"]["backward_ms"] == pytest.approx(24)
    assert found["mean"]["hidden"] == pytest.approx(0.75)
    assert [bucket["hidden"] for bucket in found["buckets"]] == pytest.approx([1, 0.5])
    assert [bucket["nbytes"] for bucket in found["buckets"]] == [100, 100]


# -- who worked when -------------------------------------------------------------------------------


def overlaps(spans):
    """Pairs of spans of different ranks that some moment belongs to both of."""
    return [
        (one, other)
        for one, other in itertools.combinations(spans, 2)
        if one.rank != other.rank
        and min(one.end_s, other.end_s) - max(one.begin_s, other.begin_s) > 1e-9
    ]


def garments():
    images, labels = torch.rand(40, 1, 28, 28), torch.randint(10, (40,))
    return ImageData("noise", images, labels, images[:10], labels[:10])


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("lenet", {}),
        ("lenet", {"weights": (1, 0, 1)}),
        ("resnet18", {"width": 8}),
        ("resnet18", {"width": 8, "batchnorm": "sync"}),
    ],
)
def test_ranks_that_take_turns_are_recorded_in_turns(model, options):
    config = TrainConfig(3, 20, epochs=1, model=model, bucket_cap_mb=0.05, **options)
    trace = Trace()
    with Trainer(config, garments(), trace=trace) as trainer:
        trainer.run()
    assert trace.steps() == [0, 1]
    has_samples = {rank for rank in range(3) if options.get("weights", (1, 1, 1))[rank]}
    for kind in ("forward", "backward", "optimizer"):
        spans = [span for span in trace.spans if span.category == kind]
        assert has_samples <= {span.rank for span in spans}, kind
        assert not overlaps(spans), kind
        assert all(span.seconds >= 0 for span in spans)
    for step in trace.steps():  # no moment of a phase is nobody's
        of_step = trace.of_step(step)
        phases_s = covered_s(span for span in of_step if span.category in ("forward", "backward"))
        turns = [span for span in of_step if span.category in ("forward", "backward")]
        assert phases_s == pytest.approx(sum(span.seconds for span in turns))
    assert "3 ranks in turns on" in trace.title
    assert {"lenet": "LeNet", "resnet18": "ResNet-18 of width 8"}[model] in trace.title
    hooks = [p._post_accumulate_grad_hooks for r in trainer.replicas for p in r]
    assert not any(hooks), "what marks turns is gone after the step"


def test_ranks_on_devices_of_their_own_work_side_by_side():
    trace = Trace()
    with trace.turns("backward", ["cuda:0", "cuda:1", "cuda:0"]) as mark:
        for rank in (0, 1, 2, 1, 2):
            mark(rank)
    found = {rank: [s for s in trace.spans if s.rank == rank] for rank in range(3)}
    assert {rank: len(spans) for rank, spans in found.items()} == {0: 1, 1: 1, 2: 1}
    assert found[0][0].end_s == found[2][0].begin_s
    assert found[1][0].begin_s == found[0][0].begin_s
    assert found[1][0].end_s == found[2][0].end_s


def test_a_phase_that_nobody_marks_is_of_all_ranks():
    trace = Trace()
    with trace.turns("forward", ["cpu"] * 2):
        pass
    assert [(span.category, span.rank) for span in trace.spans] == [("forward", 0), ("forward", 1)]


def test_a_cap_below_one_megabyte_gives_several_buckets():
    """As the command in docs/tasks.md promises."""
    nets = [resnet18(width=8, seed=0)]
    with pr.GradientBucketer(nets, bucket_cap_mb=0.1) as bucketer:
        assert len(bucketer.buckets) >= 4


# -- pictures --------------------------------------------------------------------------------------


def drawn_rows(trace, monkeypatch):
    """The labels of the rows, and the title, of the picture of the last step."""
    seen = {}

    def look(figure, path, **options):
        (axes,) = figure.axes
        seen["rows"] = [label.get_text() for label in axes.get_yticklabels()]
        seen["title"] = axes.get_title(loc="left")
        seen["buckets"] = [text.get_text() for text in axes.texts]

    monkeypatch.setattr(Figure, "savefig", look)
    trace.plot("unused.png")
    return seen


def test_a_picture_has_a_row_for_each_rank_and_one_for_all_buckets(trace, monkeypatch):
    trace.title = "a net, 2 ranks, costs $1 $2"
    seen = drawn_rows(trace, monkeypatch)
    assert seen["rows"] == ["rank 0", "rank 1", "buckets,\nall ranks"]
    assert seen["title"].splitlines() == [r"a net, 2 ranks, costs \$1 \$2", "step 2: 15.0 ms"]
    assert len(seen["buckets"]) == 2, "drawn once, not once for each rank"


def test_a_thousand_ranks_fit_into_a_picture(monkeypatch):
    trace = Trace()
    with trace.span("wait", *range(1000)):
        pass
    seen = drawn_rows(trace, monkeypatch)
    assert len(seen["rows"]) == 33
    assert "the first 32 of 1000 ranks" in seen["title"]


def test_a_picture_leaves_pyplot_alone(trace, tmp_path):
    """In a notebook the pictures after it must still appear there."""
    plt.switch_backend("svg")
    try:
        trace.plot(tmp_path / "t.png")
        assert plt.get_backend() == "svg"
        assert plt.get_fignums() == []
    finally:
        plt.switch_backend("Agg")


# -- files that are no traces ----------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 200
SPAN = b'{"ph":"X","name":"n","cat":"wait","pid":0,"ts":0,"dur":%s,"args":{"step":0,"bytes":0}}'


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (PNG, "it is not text"),
        (b"\0" * 1000, "it is not JSON"),
        (b"step ms\n1 2\n", "it is not JSON"),
        (b"[]", "it is JSON without a list 'traceEvents'"),
        (b"7", "it is JSON without a list 'traceEvents'"),
        (b"{}", "it is JSON without a list 'traceEvents'"),
        (b'{"traceEvents": 3}', "it is JSON without a list 'traceEvents'"),
        (b'{"traceEvents": []}', "it holds no step"),
        (b'{"traceEvents": [{}]}', "traceEvents[0] has no 'ph'"),
        (b'{"traceEvents": [7]}', "traceEvents[0] is a int, not an object"),
        (b'{"traceEvents": [{"ph": "X", "name": "n"', "its JSON is cut off after 40 bytes"),
        (b'{"traceEvents": [{"ph": "X", "na', "its JSON is cut off after 32 bytes"),
        (b'{"traceEvents": [,]}', "it is not JSON: line 1, column 18"),
        (b'{"traceEvents": [%s]}' % (SPAN % b"-1"), "dur is -1, expected 0 or more"),
        (b'{"traceEvents": [%s]}' % (SPAN % b"NaN"), "dur is nan, expected microseconds"),
        (b'{"traceEvents": [%s]}' % (SPAN % b'"%s"' % (b"x" * 10**6)), "expected microseconds"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_other_files_are_refused_in_one_line(tmp_path, content, why, capsys):
    file = tmp_path / "other.json"
    file.write_bytes(content)
    assert main(["trace", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file} is not a trace of `pyringar train`: " in line
    assert why in line
    assert len(line) < 300, "nothing of what it holds is printed"


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, capsys):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(2 * 10**9)  # takes no disk: nor may it take memory
    for path, why in (
        (tmp_path / "missing.json", "cannot be read: no such file"),
        (tmp_path, "cannot be read: it is a folder"),
        ("/dev/null", "cannot be read: /dev/null is not a regular file"),
        (tmp_path / ("x" * 300), "cannot be read: file name too long"),
        (huge, "it has 2000000000 bytes, expected at most 268435456"),
    ):
        assert main(["trace", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(path) in line
        assert why in line


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--step", "9", "--timeline", "t.png"], "--step is 9, expected one of the trace's steps"),
        (["--step", "1"], "--step is 1, which needs --timeline"),
    ],
)
def test_a_step_that_cannot_be_drawn_is_refused(trace, tmp_path, options, why, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace.save("t.json")
    assert main(["trace", "t.json", *options]) == 2
    found = capsys.readouterr()
    assert why in found.err
    assert not found.out
    assert not (tmp_path / "t.png").exists()


def test_an_unknown_category_is_refused():
    with pytest.raises(pr.ArgumentError, match="category is 'lunch'"):
        Trace().add("a", "lunch", 0, 0, 1)


def test_buckets_of_a_real_step():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))]
    nets += [copy.deepcopy(nets[0])]
    trace = Trace()
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
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


def test_first_bucket_of_resnet_launches_early():
    nets = [resnet18(width=8, seed=0) for _ in range(2)]
    images = [torch.randn(16, 1, 28, 28) for _ in nets]
    shares = []
    options = {"bucket_cap_mb": 0.05, "overlap": True}
    with pr.GradientBucketer(nets, **options) as bucketer:
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
