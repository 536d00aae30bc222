"""Runs DistributedTest, which torch's wheel holds, on ranks that are threads (`pyringar.launch`).

    python tests/torch_suite_threads.py [--match PATTERN] [--json FILE]

The script replaces what torch's harness does to start processes. What a process does then is
torch's: each test runs on every rank of a cluster. A test that takes longer than the deadline ends
the process that runs the tests, and another one goes on with the next test.

What fails must stand in torch_suite_threads_accepted.txt, which gives the reason.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import functools
import json
import os
import subprocess
import sys
import tempfile
import types
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "4"}  # DistributedTest reads these at import
from torch.testing._internal.distributed import distributed_test

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an installed one comes first
from pyringar.cluster.launch import launch

ACCEPTED = Path(__file__).with_name("torch_suite_threads_accepted.txt")
DEADLINE_S = 60.0

suite: Any = distributed_test


class TestOnThreads(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def replace_launching() -> None:
    harness: Any = common_distributed.MultiProcessTestCase
    harness._spawn_processes = lambda self: None
    harness.join_or_run = join_or_run
    harness.run_test = run_test
    suite.Barrier.sync = classmethod(meet_by_store)


def join_or_run(self: Any, fn: Callable[[], object]) -> Any:
    @functools.wraps(fn)
    def wrapper(self: Any) -> None:
        if self.rank == -1:
            launch(functools.partial(run_on_rank, self), ranks=int(self.world_size), timeout=40)
        else:
            fn()

    return types.MethodType(wrapper, self)


def run_on_rank(case: Any) -> None:
    reasons = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    if hasattr(case, "_tls"):  # the precision, which torch keeps per thread
        case._tls.precision, case._tls.rel_tol = case._precision, case._rel_tol
    rank, fake = int(os.environ["RANK"]), getattr(case, "fake_pg", False)
    try:
        case._run(rank, case._testMethodName, case.file_name, None, fake_pg=fake)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise unittest.SkipTest(reasons[end.code]) from None  # a KeyError: no skip


def run_test(self: Any, test_name: str, parent_pipe: object) -> None:
    """Do what `MultiProcessTestCase.run_test` does, but for pipes, signals and exits."""
    common_utils.set_rng_seed()
    getattr(self, test_name)()
    if self.destroy_pg_upon_exit and dist.is_initialized():
        dist.destroy_process_group()


def meet_by_store(cls: Any, wait_for: int | None = None, timeout: int = 10) -> None:
    """Do as DistributedTest's barrier of files, which knows ranks by their process."""
    store, rank, size = next(dist.rendezvous("env://"))
    number = store.add(f"harness/{rank}", 1)
    if store.add(f"harness/meeting {number}", 1) == (wait_for or size):
        store.set(f"harness/met {number}", "")
    store.wait([f"harness/met {number}"])


def work(log: Path, pattern: str) -> None:
    done = {json.loads(line)["test"] for line in log.read_text().splitlines()}
    replace_launching()
    out = log.open("a", buffering=1)
    for case in unittest.defaultTestLoader.loadTestsFromTestCase(TestOnThreads):
        name = case.id().split(".")[-1]
        if name in done or not fnmatch.fnmatch(name, pattern):
            continue
        print(json.dumps({"test": name}), file=out)
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        result = unittest.TestResult()
        unittest.TestSuite([case]).run(result)
        faulthandler.cancel_dump_traceback_later()
        bad = [text for _, text in (*result.errors, *result.failures)]
        bad += ["unexpected success"] * len(result.unexpectedSuccesses)
        outcome = "failed" if bad else "skipped" if result.skipped else "passed"
        reason = "\n".join(bad or [why for _, why in result.skipped])
        print(json.dumps({"test": name, "outcome": outcome, "reason": reason}), file=out)


def run_all(pattern: str) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        log, shown = Path(folder, "log"), Path(folder, "shown")
        log.touch()
        command = [sys.executable, __file__, "--log", str(log), "--match", pattern]
        environment = os.environ | {"TEMP_DIR": folder}
        while True:
            before = log.stat().st_size
            with shown.open("w") as out:
                done = subprocess.run(command, stdout=out, stderr=out, env=environment)
            results = {r["test"]: r for r in map(json.loads, log.read_text().splitlines())}
            if done.returncode == 0:
                return results
            end = f"process ended ({done.returncode}): {shown.read_text(errors='replace')[-9000:]}"
            assert log.stat().st_size > before, end
            with log.open("a") as out:
                for result in results.values():
                    if "outcome" not in result:
                        print(json.dumps(result | {"outcome": "failed", "reason": end}), file=out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="where to write every outcome")
    parser.add_argument("--match", default="*", help="pattern of test names")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # of a worker
    options = parser.parse_args()
    if options.log:
        work(options.log, options.match)
        os._exit(0)  # threads that a test has left must not keep the process
    results = run_all(options.match)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    counts = Counter(result["outcome"] for result in results.values())
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")))
    accepted = {line.split("  ", 1)[0] for line in ACCEPTED.read_text().splitlines()}
    failed = {name for name, result in results.items() if result["outcome"] == "failed"}
    for name in sorted(failed - accepted):
        print(f"\n{name}\n{results[name]['reason'][-2000:]}")
    return int(bool(failed - accepted))


if __name__ == "__main__":
    sys.exit(main())
