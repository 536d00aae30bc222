"""Test the pictures of the chapter and the live plots."""

from __future__ import annotations

import io
import itertools
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
from training_runs import garments

from pyringar import ArgumentError, figures
from pyringar.cli import main
from pyringar.comm.ring_schedule import ring_schedule
from pyringar.train import EpochResult, LivePlot
from pyringar.train import trainer as trainer_module

FRAMES = [[[[rank]] * 4 for rank in range(4)]] * 7


def lines(**options):
    curves = {"naive": [1.0, 3.0, 7.0], "ring": [1.0, 1.5, 1.75]}
    return figures.Lines([2, 4, 8], curves, "ranks k", "MB", "Traffic", **options)


def timeline(end_s=0.005):
    buckets = [(400_000, 0.001, 0.002, 0.003), (4_000, 0.003, 0.003, end_s)]
    return figures.Timeline("ring", 0.004, 0.001, buckets)


PANELS = {
    "lines": lines(),
    "logarithmic": lines(log="xy", ylim=(0.5, 100)),
    "single points": lines(points={"naive": [(2, 1.5)], "other": [(4, 2.0)]}),
    "levels": lines(levels={"limit": 2.0}),
    "bars": figures.Bars({"naive": 85.3, "ring": 5.5}, "ms", "One allreduce"),
    "table": figures.Table([16, 64], [0.1, 0.2, 0.4], [[1, 2, 3], [4, 5, 6]], "rate", "batch"),
    "timeline": timeline(),
    "timeline without an end": timeline(None),
}
PICTURES = {
    **{name: (panel,) for name, panel in PANELS.items()},
    "side by side": (lines(), PANELS["bars"]),
}


def axes_of(picture):
    picture._repr_png_()
    return picture.figure.axes


@pytest.mark.parametrize("legend", ["inside", "below"])
@pytest.mark.parametrize("name", PICTURES)
def test_picture_contains_all_parts(name, legend):
    picture = figures.draw(*PICTURES[name], legend=legend)
    picture._repr_png_()
    drawn = picture.figure.get_tightbbox()  # bounding box in inches
    assert -0.01 <= drawn.x0 <= drawn.x1 <= picture.figure.get_figwidth() + 0.01
    assert -0.01 <= drawn.y0 <= drawn.y1 <= picture.figure.get_figheight() + 0.01
    for axes in picture.figure.axes:
        assert axes.yaxis.label.get_window_extent().height <= axes.get_window_extent().height


def test_tick_labels_do_not_overlap():
    many = figures.Lines([i / 16 for i in range(17)], {"k = 1": range(1, 18)}, log="y")
    for axes in axes_of(figures.draw(many, lines(log="xy"))):
        x, y = axes.get_xticklabels(), axes.get_yticklabels()
        ends = [label.get_window_extent() for label in x if label.get_text()]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(ends))
        assert {"1", "2", "5"} <= {label.get_text() for label in y}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8"]


def test_panels_show_given_numbers():
    panels = (figures.Bars({"a": 7297.0, "b": 7.37}, form=",.1f"), PANELS["table"], timeline(None))
    bars, table, line = figures.draw(*panels).figure.axes
    assert {text.get_text() for text in bars.texts} == {"7,297.0", "7.4"}
    colors = {text.get_text(): text.get_color() for text in table.texts}
    assert colors == {f"{i}.00": "black" if i < 4 else "white" for i in range(1, 7)}
    assert line.get_title() == "ring: 1.0 ms exposed"
    last = line.patches[-1]
    # The last bar ends with the step, after 5 ms.
    assert last.get_x() + last.get_width() == pytest.approx(5.0)
    assert [label.get_text() for label in line.get_yticklabels()] == ["compute", "0.4 MB", "0.0 MB"]


def test_special_figures_are_complete():
    """ring_steps() labels all chunks, splits() draws all boxes, and images() shows all pixels."""
    labels = [
        text.get_text()
        for axes in axes_of(figures.ring_steps(FRAMES, ring_schedule(4)))
        for text in axes.texts
    ]
    assert sum(label.startswith("chunk ") for label in labels) == 6 * 4
    for axes in axes_of(figures.splits()):
        colors = [mpl.colors.to_hex(box.get_facecolor()) for box in axes.patches]
        assert {colors.count(color) for color in figures.COLORS} == {16}
    images = figures.images(torch.arange(8.0).reshape(2, 1, 2, 2))
    shown = [axes.get_images()[0].get_array().tolist() for axes in axes_of(images)]
    assert shown == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_wrong_panels_raise():
    with pytest.raises(ArgumentError, match=r"curves\['a'\] has 1 values, expected 2"):
        figures.Lines([1, 2], {"a": [1]})
    with pytest.raises(ArgumentError, match="legend is 'left', expected one of inside"):
        figures.draw(lines(), legend="left")
    with pytest.raises(ArgumentError, match="frames has 3 ranks, expected 4"):
        figures.ring_steps([[[[0]] * 3] * 3], [])


def test_saving_keeps_matplotlib_state(tmp_path):
    before = mpl.rcParams.copy()
    picture = figures.draw(lines(), PANELS["bars"], PANELS["table"], timeline())
    for ending in ("png", "svg", "pdf"):
        path = tmp_path / f"picture.{ending}"
        picture.save(path)
        assert ending.encode() in path.read_bytes()[:1024].lower()
    assert mpl.rcParams.copy() == before


# -- live plots ------------------------------------------------------------------------------------


PNG = b"\x89PNG\r\n"


def epochs(*accuracies):
    return [EpochResult(i, 1.0, accuracy, 0.1) for i, accuracy in enumerate(accuracies, 1)]


def test_text_plot_has_bar_per_epoch():
    file = io.StringIO()
    with LivePlot(where="text", file=file) as plot:
        for result in epochs(0.0, 0.5, 1.0):
            plot.curve("k = 2")(result)
    bars = [f"k = 2, epoch  {i}  {share:.3f}  " for i, share in ((1, 0.0), (2, 0.5), (3, 1.0))]
    wanted = [bar + "█" * n for bar, n in zip(bars, (0, 20, 40), strict=True)]
    assert file.getvalue().splitlines() == wanted


# -- notebooks -------------------------------------------------------------------------------------


@pytest.fixture
def display(monkeypatch):
    plt.switch_backend("Agg")  # otherwise matplotlib asks the fake IPython for a backend
    ipython = ModuleType("IPython")
    ipython.version_info = (9, 0)  # matplotlib reads it
    ipython.display = mock.Mock()
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return ipython.display


def test_notebook_updates_one_picture(display):
    plot = LivePlot(2)
    for label, accuracies in (("k = 1", (0.3, 0.4)), ("k = 2", (0.5, 0.6, 0.7)), ("k = 1", (0.8,))):
        on_epoch = plot.curve(label)
        for result in epochs(*accuracies):
            on_epoch(result)
    image = display.Image.return_value
    display.display.assert_called_once_with(image, display_id=True)
    assert display.display.return_value.update.call_args_list == [mock.call(image)] * 5
    images = [call.kwargs["data"] for call in display.Image.call_args_list]
    assert all(image.startswith(PNG) for image in images)
    assert len(set(images)) == 6, "every epoch changes the picture"
    assert plot.curves == {"k = 1": [0.8], "k = 2": [0.5, 0.6, 0.7]}
    assert plt.get_fignums() == []


def test_terminal_ipython_displays_no_picture(monkeypatch, display):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    LivePlot(1, file=io.StringIO())(*epochs(0.5))
    display.display.assert_not_called()


# -- with the trainer ------------------------------------------------------------------------------


def test_command_draws_bars_in_rows(monkeypatch, capsys):
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: garments(60, 20))
    assert main(["train", "lenet", "--epochs", "2", "--lr", "0.01", "--live"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:-1]]
    assert [row[0] for row in rows] == ["1", "2"]
    for row in rows:
        assert row[4:] == ["█" * round(40 * float(row[2]))]
