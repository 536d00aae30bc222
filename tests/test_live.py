"""Is a live plot one picture that changes in notebooks, and a bar per epoch elsewhere?"""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import matplotlib.pyplot as plt
import pytest
from training import garments

from pyringar.cli import main
from pyringar.train import EpochResult, LivePlot
from pyringar.train import trainer as trainer_module

PNG = b"\x89PNG\r\n"


def epochs(*accuracies):
    return [EpochResult(i, 1.0, accuracy, 0.1) for i, accuracy in enumerate(accuracies, 1)]


def test_text_has_bar_per_epoch():
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
    plt.switch_backend("Agg")  # before it would ask the stand-in
    ipython = ModuleType("IPython")
    ipython.version_info = (9, 0)  # matplotlib looks
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


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch, display):
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
