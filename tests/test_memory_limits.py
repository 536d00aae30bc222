"""Is memory that a cgroup will not give refused, before the kernel kills somebody for it?"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from programs import run_programs

import pyringar as pr
from pyringar.engine import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")

MIB = 2**20
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "30 23 0:27 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


@pytest.fixture
def machine(tmp_path):
    """``machine(mounts, cgroup, limits)``: bytes left in a tree with these files.

    ``limits``: by folder below / and in MiB, (limit or None, used, cache of files).
    """

    def left(mounts: list[str], cgroup: str, limits: dict[str, tuple], is_v2: bool) -> int:
        own = tmp_path / "proc/self"
        own.mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(
            f"MemTotal: {9000 * 1024} kB\nMemAvailable:  {7000 * 1024} kB\n"
            f"SwapTotal: 0 kB\nSwapFree: {1000 * 1024} kB\n"
        )
        (own / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
        (own / "cgroup").write_text(cgroup)
        names = ("memory.max", "memory.current", "") if is_v2 else None
        names = names or ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        for folder, (limit, used, cache) in limits.items():
            path = tmp_path / folder.strip("/")
            path.mkdir(parents=True, exist_ok=True)
            unlimited = "max" if is_v2 else str(2**63 - 4096)
            (path / names[0]).write_text(f"{unlimited if limit is None else limit * MIB}\n")
            (path / names[1]).write_text(f"{used * MIB}\n")
            files = f"{names[2]}inactive_file {cache * MIB // 2}\n"
            files += f"{names[2]}active_file {cache * MIB // 2}\n"
            of_v1 = "" if is_v2 else "inactive_file 0\n"
            (path / "memory.stat").write_text(f"anon 12345\n{of_v1}{files}shmem 77\n")
        return load.engine().memory_left_bytes(str(tmp_path))

    return left


def test_without_cgroups_it_is_the_machines_memory(machine):
    assert machine([], "", {}, True) == 8000 * MIB


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"": (None, 9, 0), "/job": (None, 9, 0), "/job/step:0": (600, 100, 0)}, 500),
        ({"/job": (600, 500, 0), "/job/step:0": (None, 1, 0)}, 100),
        ({"": (300, 10, 0), "/job": (600, 500, 0), "/job/step:0": (400, 1, 0)}, 100),
        ({"": (300, 290, 0), "/job": (600, 10, 0), "/job/step:0": (400, 1, 0)}, 10),
        ({"/job/step:0": (600, 500, 300)}, 400),
        ({"/job/step:0": (600, 700, 0)}, 0),
        ({"/job/step:0": (0, 0, 0)}, 0),
        ({"/job/step:0": (600, 20, 300)}, 600),
        ({"/other": (1, 0, 0)}, 8000),
    ],
)
@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
def test_every_cgroup_above_the_process_counts(machine, version, limits, left):
    is_v2 = version == "v2"
    mounts = [(V2_MOUNT if is_v2 else V1_MOUNT).format(root="/")]
    cgroup = "0::/job/step:0\n"
    if not is_v2:
        cgroup = "7:cpu,cpuacct:/other\n4:hugetlb,memory:/job/step:0\n1:name=systemd:/other\n"
    if version == "hybrid":
        cgroup += "0::/other\n"
        mounts.append("41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
    base = "/sys/fs/cgroup" + ("" if is_v2 else "/memory")
    assert machine(mounts, cgroup, {base + f: v for f, v in limits.items()}, is_v2) == left * MIB


@pytest.mark.parametrize(
    ("root", "cgroup", "left"),
    [
        ("/docker/abc", "/docker/abc/step", 200),  # the host's namespace, a part of it mounted
        ("/docker/abc", "/docker/abc", 300),
        ("/docker/abc", "/docker/abcdef/step", 300),
        ("/", "/../../elsewhere", 300),  # moved out of its namespace
        ("/", "/", 300),
        ("/", "/gone/step", 300),
    ],
)
def test_a_container_sees_a_part_of_the_hierarchy(machine, root, cgroup, left):
    limits = {"/sys/fs/cgroup": (300, 0, 0), "/sys/fs/cgroup/step": (200, 0, 0)}
    assert machine([V2_MOUNT.format(root=root)], f"0::{cgroup}\n", limits, True) == left * MIB


def test_what_does_not_fit_is_an_error_that_says_what_is_left():
    left = load.engine().memory_left_bytes()
    with pytest.raises(pr.RingarError, match=r"cannot allocate .* of which [0-9]+ bytes are left"):
        pr.shared_empty(left, torch.uint8)  # and nothing for page tables


IN_A_CGROUP = """
import os, sys, torch
import pyringar as pr
from pyringar.engine import load
load.engine()
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
held = pr.shared_empty(int(sys.argv[2]), torch.uint8)
try:
    pr.shared_empty(int(sys.argv[3]), torch.uint8)
except pr.RingarError as error:
    print(len(held), error)
"""


@contextlib.contextmanager
def own_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup of this test's, below the one that this process is in."""
    v1 = Path("/sys/fs/cgroup/memory")
    name = "memory.limit_in_bytes" if v1.is_dir() else "memory.max"
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"pyringar-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        if not (folder / name).exists():
            pytest.skip("cgroups here do not limit memory")
        (folder / name).write_text(str(limit_bytes))
        yield folder
    finally:
        folder.rmdir()


def test_above_a_limit_of_a_real_cgroup_nobody_is_killed():
    with own_cgroup(300 * MIB) as folder:
        sizes = [100 * MIB, 250 * MIB]  # each fits, both do not
        [done] = run_programs(IN_A_CGROUP, [folder, *sizes], timeout_s=120)
        assert done.returncode == 0, done.stderr
        assert f"{100 * MIB} cannot allocate {250 * MIB} bytes" in done.stdout


def runs_out(state) -> list[str]:
    """Rank 0 has no memory for the dense copies that ranks make whose tensors lie otherwise."""
    shape = (8, 4, 1024, 512)  # more than malloc keeps in its heap
    tensors = [torch.full(shape, float(10 * i + state.rank)) for i in range(2)]
    if state.rank == 0:
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    state.comm.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if state.rank == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MIB, hard))
    found = []
    for tensor in tensors:
        try:
            state.comm.all_reduce(tensor)
            found.append(f"sum {tensor.flatten()[0].item():g}")
        except (MemoryError, pr.RingarError) as error:
            found.append(f"{type(error).__name__} {error}")
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return found


def test_who_runs_out_in_the_midst_of_a_call_is_named(joined_crew):
    """Its next call must not be taken for this one."""
    crew = joined_crew(2)
    first, second = crew.run(runs_out)
    assert first[0].startswith("MemoryError"), first
    assert second[0].startswith("RingarError rank 0 (process "), second
    assert "failed before" in first[1]
    assert "failed before" in second[1]
