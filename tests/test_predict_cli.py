"""Does `pyringar predict` print, draw and write what it should, and say what is wrong?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyringar.cli import main

PAGE = (Path(__file__).parents[1] / "docs/predict.md").read_text(encoding="utf-8")


def printed(capsys: pytest.CaptureFixture[str], options: str) -> str:
    assert main(["predict", *options.split()]) == 0
    return capsys.readouterr().out


def table(text: str, ranks: int) -> dict[str, list[str]]:
    """The figures of every algorithm's row at a number of ranks of one node, by its name."""
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    return {row[1]: row[2:] for row in rows if row[0] == str(ranks)}


def test_the_books_parameter_server(capsys):
    text = printed(capsys, "--bytes 160000000 --ranks 4,2,1 --link custom --bandwidth-gbps 16")
    assert text.startswith("A prediction, not a measurement.")
    assert "custom: 16 GB/s each way, 0 us (given)" in text
    rows = table(text, 4)
    assert rows["naive"][:2] == ["60", "480"]
    assert rows["ring"][:2] == ["15", "240"]
    assert text.index("\n    2  naive") < text.index("\n    4  naive"), "in order of ranks"
    assert "1 rank: there is nothing to reduce." in text


def test_the_sixteen_gpu_machine(capsys):
    text = printed(capsys, "--ranks 16 --link pcie3 --compute-ms 120 --packed")
    assert "ResNet-18: 44.7 MB a rank, 76 float32 tensors, packed into one" in text
    assert "15.75 GB/s each way, 5.7 us (line rate of 16 lanes; latency: NCCL's" in text
    assert "120 ms a step, every rank its own batch (given;" in text
    rows = table(text, 16)
    assert rows["naive"][1] == "670.5"
    assert rows["ring"][1] == "83.82"
    assert float(rows["naive"][0]) / float(rows["ring"][0]) == pytest.approx(16, rel=0.05)
    for row in rows.values():
        assert float(row[2]) == pytest.approx(120 + float(row[3]), rel=1e-3)
        assert float(row[4].rstrip("%")) == pytest.approx(100 * 120 / float(row[2]), abs=0.1)
    assert "16 ranks: `auto` takes ring: between memories a ring moves the least" in text
    assert text.count("<- fastest") == 1


def test_nodes(capsys, tmp_path):
    out = tmp_path / "out.json"
    text = printed(capsys, f"--bytes 4194304 --ranks 4,8,32 --ranks-per-node 8 --json {out}")
    assert "direct/direct*" in text
    assert "* a schedule made of the engine's parts, not an algorithm of this version" in text
    assert "It drives one process and knows of no nodes" in " ".join(text.split())
    report = json.loads(out.read_text())
    assert report["is_prediction"] is True
    assert [n["nodes"] for n in report["networks"]] == [1, 1, 4]
    assert report["networks"][2]["node_link"]["latency_us"] == 14.0
    by_name = {r["algorithm"]: r for r in report["rows"] if r["world_size"] == 32}
    flat = by_name["direct"]["node_link_bytes"]
    assert by_name["ring/ring"]["node_link_bytes"] * 8 == flat
    same = printed(capsys, "--bytes 4194304 --ranks 32 --nodes 4")
    rows = [line.split() for line in same.splitlines() if line.startswith("   32 ")]
    assert len(rows) == 7
    assert all(" ".join(row) in " ".join(text.split()) for row in rows)


@pytest.mark.parametrize("ranks", ["16", "2,8"])
@pytest.mark.parametrize("compute", ["", "--compute-ms 5"])
def test_pictures(capsys, tmp_path, ranks, compute):
    file = tmp_path / "out.png"
    printed(capsys, f"--model lenet --ranks {ranks} {compute} --plot {file}")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_compute_can_be_measured(capsys):
    text = printed(capsys, "--model lenet --ranks 2 --compute-ms measure --batch-size 4")
    assert "(measured on this machine, one rank by" in text
    assert "exposed ms" in text


def test_this_machine(capsys, tmp_path):
    out = tmp_path / "cpu.json"
    text = printed(capsys, f"--link cpu --ranks 2 --bytes 65536 --json {out}")
    assert "measured ms" in text
    assert "prediction, not" not in text
    rows = json.loads(out.read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["fused", "direct", "ring"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--ranks 2,x", "--ranks is '2,x', expected whole numbers, 1 or more"),
        ("--ranks 0", "--ranks is '0', expected whole numbers"),
        ("--link telegraph", "--link is 'telegraph', expected one of nvlink4, pcie3"),
        ("--link custom", "--link is 'custom', which needs a bandwidth"),
        ("--node-link smoke", "--node-link is 'smoke', expected one of"),
        ("--bandwidth-gbps -1", "bandwidth_gbps is -1.0, expected a positive number"),
        ("--latency-us -1", "latency_us is -1.0, expected microseconds"),
        ("--bytes 6", "--bytes is 6, expected a positive multiple of 4"),
        ("--bytes 8 --compute-ms measure", "--compute-ms is 'measure', which needs a --model"),
        ("--compute-ms soon", "--compute-ms is 'soon', expected a positive number"),
        ("--compute-ms nan", "--compute-ms is 'nan', expected a positive number"),
        ("--nodes 0", "--nodes is 0, expected a whole number"),
        ("--ranks 6 --nodes 4", "world_size is 6, expected a multiple of the 4 nodes"),
        ("--ranks-per-node 0", "--ranks-per-node is 0, expected"),
        ("--nics-per-node 0", "nics_per_node is 0, expected"),
        ("--wiring star", "wiring is 'star', expected one of switch, ring"),
        ("--bucket-cap-mb 0", "--bucket-cap-mb is 0.0, expected a positive number"),
        ("--first-bucket-mb nan", "--first-bucket-mb is nan, expected a positive number"),
        ("--batch-size 0", "--batch-size is 0, expected"),
        ("--plot out.jpg", "--plot is 'out.jpg', expected a file name that ends in .png"),
        ("--json /no/such/out.json", "--json is '/no/such/out.json', but there is no folder"),
        ("--link cpu --plot out.png", "--plot is 'out.png', but --link cpu prints a table only"),
    ],
)
def test_wrong_arguments_are_named(argv, message, capsys):
    assert main(["predict", *argv.split()]) == 1
    captured = capsys.readouterr()
    assert f"ArgumentError: {message}" in captured.err
    assert captured.out == ""


def test_the_page_shows_what_is_printed(capsys):
    """Predictions depend on nothing but their arguments."""
    blocks = re.findall(
        r"<!-- predict -->\n```\n\$ pyringar (.*)\n([^`]*(?:`auto`[^`]*)*)```\n", PAGE
    )
    assert len(blocks) == PAGE.count("<!-- predict -->") == 2
    for command, output in blocks:
        assert main(command.split()) == 0
        assert capsys.readouterr().out == output, "docs/predict.md shows something else"


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["predict", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "nothing is sent, and no\nGPU is needed" in text
    assert max(len(line) for line in text.splitlines()) <= 82


def test_importing_pyringar_does_not_bring_it():
    code = "import sys, pyringar, pyringar.cli.predict; print('pyringar.predict' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_reader_that_has_enough_ends_it_quietly():
    """As `pyringar predict | head -0`; the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "pyringar", "predict", "--ranks", "2"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
