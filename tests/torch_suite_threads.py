"""Runs DistributedTest of torch's wheel on ranks that are threads (`pyringar.launch`).

    python tests/torch_suite_threads.py [--match PATTERN]

The script replaces the start of processes in torch's harness by `launch`. A test that takes longer
than the deadline ends the run, with the stacks of all threads. torch_suite_threads_accepted.txt
lists the tests that may fail, and why.
"""

import argparse
import faulthandler
import fnmatch
import functools
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "4"}  # DistributedTest reads these at import
from torch.testing._internal.distributed import distributed_test

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an installed pyringar has priority
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
    if hasattr(case, "_tls"):  # torch keeps the precision per thread
        case._tls.precision, case._tls.rel_tol = case._precision, case._rel_tol
    rank, fake = int(os.environ["RANK"]), getattr(case, "fake_pg", False)
    try:
        case._run(rank, case._testMethodName, case.file_name, None, fake_pg=fake)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise unittest.SkipTest(reasons[end.code]) from None


def run_test(self: Any, test_name: str, parent_pipe: object) -> None:
    """Run a test like `MultiProcessTestCase.run_test`, without pipes, signals and exits."""
    common_utils.set_rng_seed()
    getattr(self, test_name)()
    if self.destroy_pg_upon_exit and dist.is_initialized():
        dist.destroy_process_group()


def meet_by_store(cls: Any, wait_for: int | None = None, timeout: int = 10) -> None:
    """Replace the file barrier of DistributedTest, which identifies ranks by process."""
    store, rank, size = next(dist.rendezvous("env://"))
    number = store.add(f"harness/{rank}", 1)
    if store.add(f"harness/meeting {number}", 1) == (wait_for or size):
        store.set(f"harness/met {number}", "")
    store.wait([f"harness/met {number}"])


def failures(pattern: str) -> tuple[int, dict[str, str]]:
    """Run the tests; return the number of passed tests, and the text of each failure."""
    replace_launching()
    num_passed, failed = 0, {}
    for case in unittest.defaultTestLoader.loadTestsFromTestCase(TestOnThreads):
        name = case.id().split(".")[-1]
        if not fnmatch.fnmatch(name, pattern):
            continue
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        result = unittest.TestResult()
        unittest.TestSuite([case]).run(result)
        faulthandler.cancel_dump_traceback_later()
        texts = [text for _, text in (*result.errors, *result.failures)]
        texts += ["unexpected success"] * len(result.unexpectedSuccesses)
        if texts:
            failed[name] = "\n".join(texts)
        num_passed += not texts and not result.skipped
    return num_passed, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="*", help="pattern of test names")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        num_passed, failed = failures(options.match)
    accepted = {line.split("  ", 1)[0] for line in ACCEPTED.read_text().splitlines()}
    print(f"{num_passed} passed, {len(failed)} failed, {len(failed.keys() & accepted)} of them may")
    for name in sorted(failed.keys() - accepted):
        print(f"\n{name}\n{failed[name][-2000:]}")
    return int(bool(failed.keys() - accepted))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a failed test must not keep the process alive
