"""What fails of torch's own tests where ranks are threads (`pyringar.launch`)?

    python tests/torch_suite_threads.py [FILE ...] [--tests DIR] [--json results.json]

DIR has files of torch's test/distributed, in any folders; it is not in the wheel. Without it
DistributedTest runs, which is. What torch's harness does to start processes, or threads, is
replaced; what a process does then is torch's: each test runs on every rank of a cluster, with its
own copy of the test case. A file's tests run in a process of their own; one that takes longer than
the deadline ends that process, and another goes on with the next test.

What fails must stand in torch_suite_threads_accepted.txt, which gives the reason.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal import common_distributed, common_fsdp, common_utils

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an installed one comes first
from pyringar.cluster.launch import launch

HERE = Path(__file__).resolve().parent
ACCEPTED = HERE / "torch_suite_threads_accepted.txt"
WHEELS = "torch_suite_wheel.py"  # beside this file

Body = Callable[[Any, int], object]


def replace_launching() -> None:
    """Make torch's harness start ranks of a cluster."""
    harness: Any = common_distributed
    fsdp: Any = common_fsdp
    many, threaded = harness.MultiProcessTestCase, harness.MultiThreadedTestCase
    lasting = harness.MultiProcContinuousTest
    many._spawn_processes = threaded._spawn_threads = lambda self: None
    many.join_or_run = _runs_on_ranks(_as_process)
    many.run_test = _run_test
    threaded.join_or_run = _runs_on_ranks(
        lambda case, rank: case._run(case._testMethodName, rank, case.world_size)
    )
    threaded.run_test_with_threaded_pg = _run_test_with_threads
    lasting._spawn_processes = classmethod(_no_processes)
    lasting._worker_run_main_wait = _runs_on_ranks(_as_lasting_process)
    harness.spawn_threads_and_init_comms = _spawn_threads_and_init_comms
    # FSDPTest's own refuses to run without as many GPUs as ranks; that of its mixin runs on CPUs.
    fsdp.FSDPTest._run = vars(fsdp.FSDPTestMixin)["_run"]


def on_ranks(num_ranks: int, body: Callable[[int], object]) -> None:
    """Run a rank's part on a cluster; raise `unittest.SkipTest` where torch exits to skip."""
    reasons = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}

    def run() -> None:
        try:
            body(int(os.environ["RANK"]))
        except SystemExit as end:
            if end.code not in (None, 0):
                raise unittest.SkipTest(reasons[end.code]) from None  # a KeyError: no skip

    launch(run, ranks=num_ranks, timeout=40)


def _runs_on_ranks(body: Body) -> Callable[..., Any]:
    """Return a ``join_or_run``: the test method of the case that unittest runs starts the ranks."""

    def join_or_run(self: Any, fn: Callable[[], object]) -> Any:
        @functools.wraps(fn)
        def wrapper(self: Any) -> None:
            if self.rank == -1:
                on_ranks(int(self.world_size), functools.partial(run, self))
            else:
                fn()

        return types.MethodType(wrapper, self)

    def run(case: Any, rank: int) -> None:
        if hasattr(case, "_tls"):  # the precision, which torch keeps per thread
            case._tls.precision, case._tls.rel_tol = case._precision, case._rel_tol
        body(case, rank)

    return join_or_run


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _as_process(case: Any, rank: int) -> None:
    fake = getattr(case, "fake_pg", False)
    case._run(rank, case._testMethodName, case.file_name, None, fake_pg=fake)


def _as_lasting_process(case: Any, rank: int) -> None:
    cls = type(case)
    own: Any = type(cls.__name__, (cls,), {"rank": rank, "__module__": cls.__module__})
    own._init_pg(rank, int(cls.world_size), cls.rdvz_file)
    own._run_test_given_id(case.id())
    _leave()


def _run_test(self: Any, test_name: str, parent_pipe: object) -> None:
    """Do what `MultiProcessTestCase.run_test` does, but for pipes, signals and exits."""
    common_utils.set_rng_seed()
    getattr(self, test_name)()
    if self.destroy_pg_upon_exit:
        _leave()


def _run_test_with_threads(self: Any, test_name: str, rank: int, world_size: int) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=world_size)
    self.perThreadSetUp()
    getattr(self, test_name)()
    _leave()
    self.perThreadTearDown()


def _no_processes(cls: Any, world_size: int) -> None:
    cls.processes, cls.task_queues, cls.completion_queues = [], [], []
    with tempfile.NamedTemporaryFile(delete=False) as file:
        cls.rdvz_file = file.name


def _spawn_threads_and_init_comms(
    func: Any = None, timeout: object = None, world_size: int = 4
) -> Any:
    if func is None:
        return functools.partial(_spawn_threads_and_init_comms, world_size=world_size)

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        def body(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=world_size)
            func(self, *args, **kwargs)
            _leave()

        on_ranks(world_size, body)

    return wrapper


def _meet_by_store(cls: Any, wait_for: int | None = None, timeout: int = 10) -> None:
    """Do as DistributedTest's barrier of files, which knows ranks by their process."""
    store, rank, size = next(dist.rendezvous("env://"))
    number = store.add(f"harness/{rank}", 1)
    if store.add(f"harness/meeting {number}", 1) == (wait_for or size):
        store.set(f"harness/met {number}", "")
    store.wait([f"harness/met {number}"])


def cases_of(file: Path, root: Path, on_processes: bool) -> Iterator[unittest.TestCase]:
    """Load a file as a module; return its tests."""
    sys.path[:0] = [str(file.parent), str(root)]
    module = importlib.import_module(file.stem)
    shared: Any = sys.modules.get("torch.testing._internal.distributed.distributed_test")
    if shared is not None and not on_processes:
        shared.Barrier.sync = classmethod(_meet_by_store)

    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        yield from suite  # of a class


def work(options: argparse.Namespace) -> None:
    """Run a file's tests that are not in the log; add them to it."""
    log = Path(options.log)
    done = {json.loads(line)["test"] for line in log.read_text().splitlines()}
    if not options.processes:
        replace_launching()
    out = log.open("a", buffering=1)
    for case in cases_of(Path(options.files[0]), options.tests, options.processes):
        name = ".".join(case.id().split(".")[-2:])
        if name in done or not fnmatch.fnmatch(name, options.match):
            continue
        print(json.dumps({"test": name}), file=out)
        start_s = time.monotonic()
        faulthandler.dump_traceback_later(options.deadline, exit=True)
        result = unittest.TestResult()
        unittest.TestSuite([case]).run(result)
        faulthandler.cancel_dump_traceback_later()
        bad = [text for _, text in (*result.errors, *result.failures)]
        bad += ["unexpected success"] * len(result.unexpectedSuccesses)
        outcome = "failed" if bad else "skipped" if result.skipped else "passed"
        reason = "\n".join(bad or [why for _, why in result.skipped])
        line = {"outcome": outcome, "reason": reason, "seconds": time.monotonic() - start_s}
        print(json.dumps({"test": name} | line), file=out)


def run_file(file: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run a file's tests, in as many processes as it takes; return what became of each."""
    with tempfile.TemporaryDirectory() as folder:
        log, shown = Path(folder, "log"), Path(folder, "shown")
        log.touch()
        command = [sys.executable, __file__, "--log", str(log), "--tests", str(options.tests)]
        command += ["--deadline", str(options.deadline), "--match", options.match, str(file)]
        command += ["--processes"] * options.processes
        own = {"TEMP_DIR": folder, "BACKEND": "gloo", "WORLD_SIZE": "4"}  # DistributedTest asks
        while True:
            before = log.stat().st_size
            with shown.open("w") as out:
                code = subprocess.run(
                    command, stdout=out, stderr=out, env=own | os.environ, check=False
                )
            results = {r["test"]: r for r in map(json.loads, log.read_text().splitlines())}
            end = f"process ended ({code.returncode}): {shown.read_text(errors='replace')[-9000:]}"
            if code.returncode == 0:
                return results
            if log.stat().st_size == before:
                return results | {"(file)": {"outcome": "failed", "reason": end}}
            with log.open("a") as out:
                for result in results.values():
                    if "outcome" not in result:
                        print(json.dumps(result | {"outcome": "failed", "reason": end}), file=out)


def main() -> int:
    """Run what the command line asks for; 1 if something fails that is not accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="of DIR (default: all)")
    parser.add_argument("--tests", type=Path, metavar="DIR", help="of torch's tests")
    parser.add_argument("--json", metavar="FILE", help="where to write every outcome")
    parser.add_argument("--match", default="*", help="pattern of Class.test")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--processes", action="store_true", help="as torch starts them itself")
    parser.add_argument("--log", help=argparse.SUPPRESS)  # of a worker
    options = parser.parse_args()
    if options.log:
        work(options)
        os._exit(0)  # threads that a test has left must not keep the process
    if options.tests is None:
        options.tests, options.files = HERE, options.files or [WHEELS]
    names = options.files or sorted(
        str(path.relative_to(options.tests)) for path in options.tests.rglob("test_*.py")
    )
    everything = {name: run_file(options.tests / name, options) for name in names}
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1))
    return report(everything)


def report(everything: dict[str, dict[str, dict[str, Any]]]) -> int:
    """Print a line for each file, and what fails without a reason."""
    lines = [line.split("  ", 1) for line in ACCEPTED.read_text().splitlines()]
    accepted = {words[0] for words in lines if len(words) == 2}
    new = []
    for name, results in everything.items():
        counts = Counter(result["outcome"] for result in results.values())
        shown = ", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "skipped"))
        print(f"{name}: {shown}", flush=True)
        failed = [test for test, result in results.items() if result["outcome"] == "failed"]
        new += [f"{name}::{test}" for test in failed if f"{name}::{test}" not in accepted]
    for test in new:
        file, _, name = test.partition("::")
        print(f"\n{test}\n{everything[file][name]['reason'][-2000:]}")
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main())
