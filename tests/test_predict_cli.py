"""Does `pyringar predict` print, draw and write what it should, and say what is wrong?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pyringar.cli import main
from pyringar.predict import cpu

PAGE = (Path(__file__).parents[1] / "docs/predict.md").read_text(encoding="utf-8")


def printed(capsys: pytest.CaptureFixture[str], options: str) -> str:
    assert main(["predict", *options.split()]) == 0
    return capsys.readouterr().out


def one_line(text: str) -> str:
    """Text without its line breaks."""
    return " ".join(text.split())


def table(text: str, heading: str) -> dict[str, list[str]]:
    """The figures of every algorithm under a heading of the table, by its name."""
    block = text.split(f"\n\n{heading}\n")[1].split("\n\n")[0]
    return {row[0]: row[1:] for row in map(str.split, block.splitlines())}


def test_the_books_parameter_server(capsys):
    text = printed(capsys, "--bytes 160000000 --ranks 4,2,1 --link custom --bandwidth-gbps 16")
    assert text.startswith("A prediction, not a measurement.")
    assert "custom: 16 GB/s each way, 0 us (given)" in text
    rows = table(text, "4 ranks")
    assert rows["naive"][:2] == ["60", "480"]
    assert rows["ring"][:2] == ["15", "240"]
    assert text.index("\n2 ranks\n") < text.index("\n4 ranks\n"), "in order"
    assert "1 rank: there is nothing to reduce." in text


def test_the_sixteen_gpu_machine(capsys):
    text = printed(capsys, "--ranks 16 --link pcie3 --compute-ms 120 --packed")
    assert "ResNet-18: 44.7 MB a rank, 76 float32 tensors, packed into one" in text
    assert "15.75 GB/s each way, 5.7 us (line rate of 16 lanes;" in text
    assert "120 ms a step, every rank its own batch (given;" in text
    rows = table(text, "16 ranks")
    assert rows["naive"][1] == "671"
    assert rows["ring"][1] == "83.8"
    assert float(rows["naive"][0]) / float(rows["ring"][0]) == pytest.approx(16, rel=0.05)
    for row in rows.values():
        assert float(row[2]) == pytest.approx(120 + float(row[3]), rel=5e-3)
        assert float(row[4].rstrip("%")) == pytest.approx(100 * 120 / float(row[2]), abs=0.5)
    assert "16 ranks: `auto` takes direct: each GPU reduces a slice" in text
    assert text.count("  fastest\n") == 1


def test_nodes(capsys):
    options = "--bytes 4194304 --ranks 4,8,32 --ranks-per-node 8"
    text = printed(capsys, options)
    assert "direct/direct*" in text
    assert "* a schedule made of the engine's parts, not an algorithm of this version" in text
    assert "It drives one process and knows of no nodes" in one_line(text)
    report = json.loads(printed(capsys, f"{options} --json"))
    assert report["is_prediction"] is True
    assert [n["nodes"] for n in report["networks"]] == [1, 1, 4]
    assert report["networks"][2]["node_link"]["latency_us"] == 14.0
    by_name = {r["algorithm"]: r for r in report["rows"] if r["world_size"] == 32}
    flat = by_name["direct"]["node_link_bytes"]
    assert by_name["ring/ring"]["node_link_bytes"] * 8 == flat
    same = printed(capsys, "--bytes 4194304 --ranks 32 --nodes 4")
    rows = table(same, "32 ranks in 4 nodes")
    assert len(rows) == 7
    assert rows == table(text, "32 ranks in 4 nodes")


@pytest.mark.parametrize("ranks", ["16", "2,8"])
@pytest.mark.parametrize("compute", ["", "--compute-ms 5"])
def test_pictures(capsys, tmp_path, ranks, compute):
    file = tmp_path / "out.png"
    printed(capsys, f"--model lenet --ranks {ranks} {compute} --plot {file}")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_compute_can_be_measured(capsys):
    text = printed(capsys, "--model lenet --ranks 2 --compute-ms measure --batch-size 4")
    assert "(measured on this machine, one rank by" in one_line(text)
    assert "exposed" in text


def test_this_machine(capsys, monkeypatch):
    measured = cpu.compare_cpu([2], [65536], rounds=1)
    monkeypatch.setattr(cpu, "compare_cpu", lambda *_: measured)
    text = printed(capsys, "--link cpu --ranks 2 --bytes 65536")
    assert "measured" in text
    assert "prediction, not" not in text
    rows = json.loads(printed(capsys, "--link cpu --ranks 2 --bytes 65536 --json"))["rows"]
    assert [row["algorithm"] for row in rows] == ["fused", "direct", "ring"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--ranks 2,x", "--ranks is '2,x', expected whole numbers, 1 or more"),
        ("--ranks 0", "--ranks is '0', expected whole numbers"),
        ("--link pci5", "--link is 'pci5', expected one of nvlink4, pcie3"),
        ("--link pci5", "100gbe, custom, cpu; did you mean 'pcie5'?"),
        ("--link custom", "--link is 'custom', which needs a bandwidth"),
        ("--node-link smoke", "--node-link is 'smoke', expected one of"),
        ("--bandwidth-gbps -1", "--bandwidth-gbps is -1.0, expected a positive number"),
        ("--latency-us -1", "--latency-us is -1.0, expected microseconds"),
        ("--node-latency-us -1", "--node-latency-us is -1.0, expected microseconds"),
        ("--bytes 6", "--bytes is 6, expected a positive multiple of 4"),
        ("--bytes 8 --compute-ms measure", "--compute-ms is 'measure', which needs a --model"),
        ("--compute-ms soon", "--compute-ms is 'soon', expected a positive number"),
        ("--compute-ms nan", "--compute-ms is 'nan', expected a positive number"),
        ("--nodes 0", "--nodes is 0, expected a whole number"),
        ("--ranks 6 --nodes 4", "--ranks is 6, expected a multiple of the 4 nodes"),
        ("--ranks-per-node 0", "--ranks-per-node is 0, expected"),
        ("--nics-per-node 0", "--nics-per-node is 0, expected"),
        ("--wiring star", "--wiring is 'star', expected one of switch, ring"),
        ("--bucket-cap-mb 0", "--bucket-cap-mb is 0.0, expected a positive number"),
        ("--first-bucket-mb nan", "--first-bucket-mb is nan, expected a positive number"),
        ("--batch-size 0", "--batch-size is 0, expected"),
        ("--plot out.jpg", "--plot is 'out.jpg', expected a file name that ends in .png"),
        ("--link cpu --plot out.png", "--plot is 'out.png', but --link cpu prints a table only"),
    ],
)
def test_wrong_arguments_are_named(argv, message, capsys):
    assert main(["predict", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pyringar predict: --")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_page_shows_what_is_printed(capsys, block):
    """Predictions depend on nothing but their arguments."""
    blocks = re.findall(
        r"<!-- predict -->\n```\n\$ pyringar (.*)\n([^`]*(?:`auto`[^`]*)*)```\n", PAGE
    )
    assert len(blocks) == PAGE.count("<!-- predict -->") == 2
    command, output = blocks[block]
    assert main(command.split()) == 0
    assert capsys.readouterr().out == output, "docs/predict.md shows something else"


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["predict", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "nothing is sent, and no\nGPU is needed" in text
    assert max(len(line) for line in text.splitlines()) <= 80
