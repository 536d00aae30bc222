"""What fails in torch's own tests on the backend `ringar` that passes on gloo?

    python tests/torch_suite.py FOLDER [--only TEXT] [--files NAME ...] [--json FILE]

FOLDER is `test/distributed` of torch's source; it is not in the wheel. Every test that asks for
gloo runs twice: as it is, and from a copy that asks for ringar instead. What only ringar fails must
stand in torch_suite_accepted.txt, which gives the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
ACCEPTED = HERE / "torch_suite_accepted.txt"
FILES = [
    "test_c10d_gloo.py",
    "test_c10d_object_collectives.py",
    "test_collective_utils.py",
    "test_functional_api.py",
    "test_c10d_spawn_gloo.py",
    "test_distributed_spawn.py",
]
# In front of each file of the copies: ranks come from a server that has imported torch.
PREAMBLE = """
import torch.multiprocessing as _mp
from torch.testing._internal import common_distributed as _common
_server = _mp.get_context("forkserver")
_server.set_forkserver_preload(["torch.testing._internal.common_distributed"])
_common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(_server.Process)
"""
RINGAR = """
import pyringar.distributed
import torch.distributed as _dist
_dist.Backend.default_device_backend_map["cpu"] = "ringar"
"""
# Instead of a ProcessGroupGloo.
MAKE_GROUP = """        import datetime
        dist.init_process_group(
            "ringar", store=store, rank=self.rank, world_size=self.world_size,
            timeout=datetime.timedelta(seconds=50))
        return dist.group.WORLD
"""
ENV = {"WORLD_SIZE": "3", "TEMP_DIR": "", "OMP_NUM_THREADS": "1", "INIT_METHOD": ""}


def main() -> int:
    """Run what was asked for; the exit status is 1 if only ringar fails something not accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="test/distributed of torch's source")
    parser.add_argument("--only", default="", help="tests whose names match, as pytest -k")
    parser.add_argument("--files", nargs="*", default=FILES, help="of the folder")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each test")
    parser.add_argument("--json", type=Path, help="where to write every outcome")
    args = parser.parse_args()
    if not (args.folder / FILES[0]).is_file():
        print(f"skipped: {args.folder} has no {FILES[0]}, expected test/distributed of torch")
        return 0
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for backend in ("gloo", "ringar"):
            copy = Path(name) / backend
            prepare(args.folder, copy, args.files, backend)
            found[backend] = run(copy, args.files, backend, args.only, args.timeout)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, sort_keys=True))
    return report(found)


def prepare(folder: Path, copy: Path, files: list[str], backend: str) -> None:
    """Copy the tests; those for ringar ask for it wherever they asked for gloo."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("barrier", "test_dir", "init_dir"):  # of its TEMP_DIR
        (copy / name).mkdir(exist_ok=True)
    for path in copy.glob("*.py"):
        text = path.read_text()
        if backend == "ringar":
            text = ask_for_ringar(text)
        at = re.search(r"^(import|from) (?!__future__)", text, re.M)
        if path.name in files and at is not None:
            before = PREAMBLE + (RINGAR if backend == "ringar" else "")
            text = text[: at.start()] + before.lstrip() + text[at.start() :]
        path.write_text(text)


def ask_for_ringar(text: str) -> str:
    """Name ringar where a test names gloo."""
    text = re.sub(r"""(["'])gloo\1""", r"\1ringar\1", text)
    return re.sub(
        r"        pg = c10d\.ProcessGroupGloo\(.*?return pg\n", MAKE_GROUP, text, flags=re.S
    )


def run(
    folder: Path, files: list[str], backend: str, only: str, timeout_s: float
) -> dict[str, str]:
    """The outcome of every test: passed, failed or skipped."""
    outcomes = {}
    for file in files:
        report_file = folder / f"{file}.xml"
        env = {**os.environ, **ENV, "BACKEND": backend, "TEMP_DIR": str(folder)}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(HERE.parent), str(folder), os.environ.get("PYTHONPATH", "")]
        )
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={timeout_s:g}"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report_file}"]
        if only:
            command += ["-k", only]
        subprocess.run([*command, file], cwd=folder, env=env, check=False)
        if not report_file.is_file():
            outcomes[f"{file}::"] = "failed"
            continue
        for case in ElementTree.parse(report_file).iter("testcase"):
            name = f"{file}::{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
            kinds = {child.tag for child in case}
            is_bad = kinds & {"failure", "error"}
            outcomes[name] = "failed" if is_bad else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def accepted() -> dict[str, str]:
    """Reasons by test, from lines of ``FILE::CLASS::TEST  reason``."""
    lines = ACCEPTED.read_text().splitlines()
    pairs = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return dict(pairs)


def report(found: dict[str, dict[str, str]]) -> int:
    """Print counts and differences; 1 if one of them is not accepted."""
    for backend, outcomes in found.items():
        counts = {
            kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")
        }
        print(f"{backend:7s}" + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    reasons = accepted()
    gloo, ringar = found["gloo"], found["ringar"]
    only_ringar = sorted(n for n, o in gloo.items() if o == "passed" and ringar.get(n) != "passed")
    print(f"only ringar fails {len(only_ringar)}:")
    for name in only_ringar:
        print(f"  {name}: {reasons.get(name, 'NOT ACCEPTED')}")
    return int(any(name not in reasons for name in only_ringar))


if __name__ == "__main__":
    sys.exit(main())
