"""Is torch.distributed right on the backend `ringar`, and DistributedDataParallel on top of it?"""

from __future__ import annotations

import functools
import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import distributed_cases
import distributed_faults
import distributed_training
import pytest
import torch
from cases import mostly_slow
from programs import run_fresh, run_programs
from ranks import Died, Failed, run_cases, run_group

ROOT = Path(__file__).resolve().parents[1]
IS_BACKEND_IN_PYTHON = torch.__version__.split(".")[:2] >= ["2", "14"]


@functools.cache
def verdicts(
    cases: str, size: int, backend: str = "ringar", debug: str = "", machines: str = ""
) -> list[Any]:
    env = {"TORCH_DISTRIBUTED_DEBUG": debug} if debug else None
    work = list(importlib.import_module(f"distributed_{cases}").CASES.items())
    return run_group(run_cases, size, work, backend=backend, env=env, machines=machines)


def check(results: list[Any], case: str) -> None:
    assert all(isinstance(verdict, dict) for verdict in results), results
    failures = [verdict[case] for verdict in results if verdict[case] is not None]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("size", mostly_slow([2, 3, 4], 2))
@pytest.mark.parametrize("case", distributed_cases.CASES)
def test_collectives(case, size):
    check(verdicts("cases", size), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", distributed_cases.CASES)
def test_collectives_of_one_rank(case):
    if case not in ("broadcast", "objects", "delegated", "groups", "messages"):  # want a rank 1
        check(run_group(run_cases, 1, [(case, distributed_cases.CASES[case])]), case)


IN_DETAIL, BESIDE = (2, "ringar", "DETAIL"), (2, "cpu:ringar", "")


@pytest.mark.parametrize(
    ("size", "backend", "debug"),
    mostly_slow(
        [(2, "ringar", ""), (4, "ringar", ""), IN_DETAIL, BESIDE],
        (2, "ringar", ""),
        (4, "ringar", ""),
    ),
)
@pytest.mark.parametrize("case", distributed_training.CASES)
def test_training(case, size, backend, debug):
    check(verdicts("training", size, backend, debug), case)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hook_beside_gloo(size):
    case = distributed_training.data_parallel_hook
    results = run_group(run_cases, size, [("hook", case)], backend="gloo")
    check(results, "hook")


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", mostly_slow(["lost", "late"], "lost"))
def test_peer_is_named_by_future(what):
    """The table of tests/conformance/faults.py has the other ways to wait."""
    function = getattr(distributed_faults, f"peer_{what}")
    timeout_s = 30.0 if what == "lost" else 2.0
    (_, bases, text, seconds), other = run_group(function, 2, timeout_s=timeout_s)
    assert ("PeerLostError" if what == "lost" else "CollectiveTimeout") in text
    assert "RuntimeError" in bases
    assert "rank 1" in text
    assert seconds < 5, "long before a deadline of 30 s"
    assert seconds > 1.5 or what == "lost"
    assert other == Died(-9) or what == "late"


@pytest.mark.parametrize("backend", ["ringar", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", mostly_slow(["killed", "sleeping"], "killed"))
def test_data_parallel_fails(what, backend):
    survivor, other = run_group(
        distributed_faults.data_parallel_peer, 2, what, backend=backend, timeout_s=2.0
    )
    assert not isinstance(survivor, (Failed, Died, str)), survivor
    kind, bases, text, seconds = survivor
    assert "RuntimeError" in bases
    assert ("PeerLostError" if what == "killed" else "CollectiveTimeout") in kind + text
    assert "rank 1" in text
    assert seconds < 5
    assert what == "sleeping" or other == Died(-9)


# -- exits -----------------------------------------------------------------------------------------

EXITS: dict[str, str] = {
    "not_destroyed": "",
    "much_left": """
dist.all_to_all_single(torch.empty(2), torch.ones(2))  # gloo's
group = dist.new_group()
dist.all_reduce(torch.ones(3), group=group)
futures = [dist.all_reduce(torch.ones(9), async_op=True).get_future() for _ in range(9)]
""",
    "destroyed_twice": """
dist.destroy_process_group()
dist.init_process_group("ringar", store=dist.FileStore(path + "2", size), rank=rank,
                        world_size=size)
dist.all_reduce(x)
dist.destroy_process_group()
try:
    dist.destroy_process_group()
except (ValueError, AssertionError, RuntimeError):
    pass
else:
    raise SystemExit("destroyed twice")
""",
}
START = """
import sys
import torch
import torch.distributed as dist
import pyringar.distributed
rank, size, path = int(sys.argv[1]), 2, sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("ringar", store=dist.FileStore(path, size), rank=rank, world_size=size)
x = torch.tensor([1.0 + rank])
dist.all_reduce(x)
assert x.item() == 3.0
dist.all_reduce(x, async_op=True).wait()
"""
TRAIN = """
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(x.expand(2)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", EXITS)
def test_exit(how, tmp_path):
    ranks = [(rank, tmp_path / "store") for rank in range(2)]
    for done in run_programs(START + TRAIN + EXITS[how], *ranks):
        assert done.returncode == 0, done
        assert "Traceback" not in done.stdout + done.stderr
        assert "terminate called" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not IS_BACKEND_IN_PYTHON, reason="torch looks for entry points from 2.14 on")
def test_installed_package_needs_no_import(tmp_path):
    """Metadata as `pip install` writes it, beside the checkout on the path."""
    folder = tmp_path / "site" / "pyringar-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pyringar\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('entry-points."torch.distributed.backends"]\n')[1].split("\n\n")[0]
    entry = section.replace('"', "").strip()
    (folder / "entry_points.txt").write_text(f"[torch.distributed.backends]\n{entry}\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})" + START.replace(
        "import pyringar.distributed\n", ""
    )
    with ThreadPoolExecutor(2) as both:
        ranks = [both.submit(run_fresh, script, rank, tmp_path / "store") for rank in range(2)]
    assert [rank.result().returncode for rank in ranks] == [0, 0], [r.result() for r in ranks]
