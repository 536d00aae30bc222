"""Is a live plot one picture that changes, in notebooks and terminals, and is it the curve?"""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import matplotlib.pyplot as plt
import pytest
from training import garments

from pyringar.cli import main
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.train import EpochResult, LivePlot, train
from pyringar.train import trainer as trainer_module
from pyringar.train.plots import text_plot

PNG = b"\x89PNG\r\n"
ERASE = "\x1b[11F\x1b[J"  # the eleven lines of a plot


def epochs(*accuracies):
    return [EpochResult(i, 1.0, accuracy, 0.1) for i, accuracy in enumerate(accuracies, 1)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: garments(60, 20))


# -- text ------------------------------------------------------------------------------------------


def test_a_known_curve_as_text():
    assert text_plot({"accuracy": [0.1, 0.8, 0.4]}, 3).splitlines() == [
        " 0.8 │       ●",
        "     │",
        "     │",
        "     │",
        "     │             ●",
        "     │",
        "     │",
        " 0.1 │ ●",
        "     └──────────────",
        "       1           3 epoch",
        "       ● accuracy",
    ]


def test_curves_have_markers_of_their_own():
    assert text_plot({}, 3).splitlines()[0] == " 1.0 │"
    lines = text_plot({"a": [0.2, 0.3], "b": [0.9]}, 2).splitlines()
    assert lines[0] == " 0.9 │ ○"
    assert lines[-4] == " 0.2 │ ●"
    assert lines[-1] == "       ● a  ○ b"
    many = text_plot({str(i): [i / 20] for i in range(20)}, 1).splitlines()[-1]
    assert many.count("●") == 3, "markers are used again when there are more curves than markers"


@pytest.mark.parametrize("num_epochs", [1, 2, 9, 10, 11, 59, 60, 61, 121, 1000])
def test_any_number_of_epochs_fits(num_epochs):
    values = [epoch / num_epochs for epoch in range(num_epochs)]
    lines = text_plot({"accuracy": values}, num_epochs).splitlines()
    assert max(map(len, lines)) <= 76
    plot = lines[:8]
    assert plot[-1].count("●") >= 1, "the first epoch is at the bottom"
    assert sum("●" in line for line in plot) >= min(num_epochs, 7), "it climbs"


@pytest.mark.parametrize("value", [0.0, 0.1, 0.5, 1.0])
def test_level_curve_fits_the_axis(value):
    lines = text_plot({"accuracy": [value, value]}, 2).splitlines()
    low, high = float(lines[7][:4]), float(lines[0][:4])
    assert 0 <= low <= value <= high <= 1
    assert sum(line.count("●") for line in lines[:8]) == 2


def test_a_terminal_is_written_over():
    terminal = Terminal()
    with LivePlot(2, where="text", file=terminal) as plot:
        first, second = epochs(0.25, 0.75)
        plot(first)
        assert terminal.getvalue().count("● accuracy 0.250") == 1
        drawn = len(terminal.getvalue())
        plot(second)
        update = terminal.getvalue()[drawn:]
        assert "● accuracy 0.750" in update
        assert update.startswith(ERASE)
        assert update.count("\n") == 11
    finished = str(plot)
    assert finished.endswith("● accuracy 0.750, loss 1.000")
    assert terminal.getvalue().endswith(f"{ERASE}{finished}\n")


@pytest.mark.parametrize("accuracies", [(), (0.25, 0.75), (0.1, 0.2, 0.3)], ids=len)
def test_a_file_gets_the_finished_plot_only(accuracies):
    file = io.StringIO()
    with LivePlot(2, where="text", file=file) as plot:
        for result in epochs(*accuracies):
            plot(result)
            assert file.getvalue() == ""
    assert file.getvalue() == (f"{plot}\n" if accuracies else "")
    assert f"{max(2, len(accuracies))} epoch" in str(plot), "the axis grows with more epochs"


# -- notebooks -------------------------------------------------------------------------------------


@pytest.fixture
def display(monkeypatch):
    """Stands for ``IPython.display`` in a notebook."""
    plt.switch_backend("Agg")  # before it would ask the stand-in
    ipython = ModuleType("IPython")
    ipython.version_info = (9, 0)  # matplotlib looks
    ipython.display = mock.Mock()
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return ipython.display


def test_an_error_comes_out_and_draws_nothing():
    file = io.StringIO()
    with pytest.raises(ZeroDivisionError), LivePlot(where="text", file=file):
        raise ZeroDivisionError
    assert file.getvalue() == ""


def test_notebook_updates_one_picture(display):
    backend = plt.get_backend()
    with LivePlot(3) as plot:
        for result in epochs(0.1, 0.5, 0.6):
            plot(result)
    display.display.assert_called_once_with(display.Image.return_value, display_id=True)
    image = display.Image.return_value
    assert display.display.return_value.update.call_args_list == [mock.call(image)] * 2
    images = [call.kwargs["data"] for call in display.Image.call_args_list]
    assert all(image.startswith(PNG) for image in images)
    assert len(set(images)) == 3, "every epoch changes the picture"
    assert plt.get_fignums() == []
    assert plt.get_backend() == backend


def test_runs_share_a_picture(display):
    plot = LivePlot(2)
    for label in ("k = 1", "k = 2", "k = 1"):
        on_epoch = plot.curve(label)
        for result in epochs(0.3, 0.4):
            on_epoch(result)
    display.display.assert_called_once()
    assert plot.curves == {"k = 1": [0.3, 0.4], "k = 2": [0.3, 0.4]}


def test_without_ipython_it_is_text(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", None)  # importing it fails
    with LivePlot(1) as plot:
        plot(*epochs(0.5))
    assert "● accuracy 0.500" in capsys.readouterr().out
    with pytest.raises(UnsupportedError, match=r"IPython .*pip install ipython"):
        LivePlot(where="notebook")


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch, display):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    LivePlot(1, file=io.StringIO())(*epochs(0.5))
    display.display.assert_not_called()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "browser"}, "where is 'browser', expected one of auto, notebook"),
        ({"num_epochs": 0}, "num_epochs is 0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        LivePlot(**options)


# -- with the trainer ------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_images")
def test_the_curve_is_the_results():
    with LivePlot(where="text", file=io.StringIO()) as plot:
        result = train(2, 20, 0.1, epochs=2, devices=["cpu", "cpu"], on_epoch=plot)
    assert plot.curves == {"accuracy": result.curve}


@pytest.mark.usefixtures("few_images")
def test_command_prints_rows_then_plot(capsys):
    assert main(["train", "lenet", "--epochs", "2", "--live"]) == 0
    out = capsys.readouterr().out
    assert out.count("● accuracy") == 1
    assert out.index("    2  ") < out.index("● accuracy") < out.index("test acc: ")


@pytest.mark.usefixtures("few_images")
def test_command_redraws_in_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["train", "lenet", "--epochs", "2", "--live"]) == 0
    out = terminal.getvalue()
    assert out.count("● accuracy") == 3, "after each epoch, and in the end"
    assert out.count(ERASE) == 2
    assert out.index("● accuracy") < out.index(ERASE) < out.index("    2  ")
