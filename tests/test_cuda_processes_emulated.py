"""Are ranks in processes with GPUs right, all below Python, on devices that are host memory?

Everything below Python, bit for bit against the oracle: the kernels' own source, slots and events
on streams that run as late and as far out of order as CUDA allows. Then with mistakes planted, each
of which must be noticed. All are slow.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_cuda_emulated import EMULATED, FLAGS, PLAIN, planted
from test_layering import cuda_includes
from test_stress import (
    BASE_FLAGS,
    COMPILE_TIMEOUT_S,
    CSRC,
    ENGINE_SOURCES,
    RUN_TIMEOUT_S,
    STRESS,
    compile_all,
    require,
    run,
)

pytestmark = pytest.mark.slow

HERE = STRESS / "cuda_processes"
# Those in which mistakes are planted, and what includes them.
CHANGING = [
    "cuda/folds.cpp",
    "cuda_process/engine.cpp",
    "cuda_process/staging.cpp",
    "cuda_process/group.cpp",
]
CONSTANT = [
    *("cuda/kernels.cpp", "cuda/kernels_float.cu", "cuda/kernels_half.cu"),
    *("cuda/kernels_integer.cu", "cuda/runtime.cpp"),
    *(path.relative_to(CSRC).as_posix() for path in ENGINE_SOURCES),
]
TEST_SOURCES = [
    *(EMULATED / "cuda_emulator.cpp", STRESS / "check.cpp", STRESS / "oracle.cpp"),
    *sorted(HERE.glob("*.cpp")),
]
ROUNDS = 40

ENGINE, STAGING = "cuda_process/engine.cpp", "cuda_process/staging.h"
GROUP = "cuda_process/group.cpp"
MISTAKES = {
    "announced-not-awaited": (ENGINE, {"    staging_.await_announced(n, stream_);\n": ""}),
    "reduced-not-awaited": (ENGINE, {"    staging_.await_reduced(n, stream_);\n": ""}),
    "event-before-copy": (
        ENGINE,
        {
            "    staging_.record_announced(n, stream_);\n    Staged": "    Staged",
            "    if (world_size_ == 1) return;\n": "    staging_.record_announced(n, stream_);\n"
            "    if (world_size_ == 1) return;\n",
        },
    ),
    "event-before-reduction": (
        ENGINE,
        {
            "    if (n != base_) staging_.record_reduced(n, stream_);\n": "",
            "    fold(piece, n, slice": "    staging_.record_reduced(n, stream_);\n"
            "    fold(piece, n, slice",
        },
    ),
    "host-before-event": (
        ENGINE,
        {
            "    staging_.record_announced(n, stream_);\n    StagedCounters::announce(n);\n": "    "
            "StagedCounters::announce(n);\n    staging_.record_announced(n, stream_);\n"
        },
    ),
    "stream-before-host": (
        ENGINE,
        {
            "    if (!StagedCounters::wait_announced(n)) return false;\n": "",
            "    staging_.await_announced(n, stream_);\n    return true;": "    "
            "staging_.await_announced(n, stream_);\n    return StagedCounters::wait_announced(n);",
        },
    ),
    "slot-off-by-one": (ENGINE, {"return slot(rank_, n); }": "return slot(rank_, n + 1); }"}),
    "slot-too-few": (STAGING, {"message % kStagingSlots * own": "message % 3 * own"}),
    "events-too-few": (
        STAGING,
        {
            "own_.announced[message % kStagingSlots]": "own_.announced[message % 2]",
            "peer.announced[message % kStagingSlots]": "peer.announced[message % 2]",
        },
    ),
    "event-recorded-again": (ENGINE, {"    if (n != base_) staging_": "    staging_"}),
    "calls-not-in-order": (ENGINE, {"    staging.begin(stream);\n": ""}),
    "end-not-recorded": (ENGINE, {"    staging.end(stream);\n": ""}),
    "last-rank-first": (
        ENGINE,
        {
            "sources[static_cast<std::size_t>(rank)] =": "sources["
            "static_cast<std::size_t>(world_size_ - 1 - rank)] ="
        },
    ),
    "not-after-the-caller": (GROUP, {"    ready->make_wait(stream_->get(), device_);\n": ""}),
    "freed-while-open": (GROUP, {"!(is_idle && all_others_are_gone(*host_))) {": "false) {"}),
    "unmapped-while-read": (GROUP, {"staging_ == nullptr || wait_until_idle()": "true"}),
    "digest-too-soon": (
        GROUP,
        {'cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", device_);': ""},
    ),
    "capture-unseen": (
        GROUP,
        {"if (!cuda::is_capturing(stream, device_))": "if (stream != nullptr || device_ >= 0)"},
    ),
    "probe-unread": ("cuda_process/staging.cpp", {"differs.first != found.end()": "false"}),
    "bits-not-kept": (
        "cuda/folds.cpp",
        {"as = copied_as(item_bytes(dtype));": "as = bytes > 0 ? dtype : copied_as(1);"},
    ),
}


class Builder:
    """Compiles once what no mistake is planted in."""

    def __init__(self, folder: Path, headers: tuple[Path, ...]):
        includes = [f"-I{path}" for path in (STRESS, EMULATED, HERE)]
        system = [f"-isystem{path}" for path in headers]
        # BASE_FLAGS name CSRC, after the copy that has a mistake.
        self.compiler = ["g++", *includes, *system, *FLAGS, *PLAIN.flags, "-Wno-psabi", "-x", "c++"]
        self.folder = folder
        self.constant = self.compile([*(CSRC / s for s in CONSTANT), *TEST_SOURCES], CSRC, folder)

    def compile(self, sources: list[Path], csrc: Path, folder: Path) -> list[Path]:
        objects = [folder / f"{i}_{source.name}.o" for i, source in enumerate(sources)]
        compile_all(
            [
                [self.compiler[0], f"-I{csrc}", *BASE_FLAGS, *self.compiler[1:], "-c", s, "-o", o]
                for s, o in zip(sources, objects, strict=True)
            ]
        )
        return objects

    def build(self, csrc: Path, folder: Path) -> Path:
        """The program, with what may hold a mistake from below ``csrc``."""
        changing = self.compile([csrc / source for source in CHANGING], csrc, folder)
        program = folder / "group_test"
        compile_all([["g++", "-pthread", *changing, *self.constant, "-o", program]])
        return program


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    require("g++")
    return Builder(tmp_path_factory.mktemp("processes"), cuda_includes())


@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
def test_ranks_in_processes_on_devices_of_memory(builder, tmp_path):
    program = builder.build(CSRC, tmp_path)
    for seed in range(1, 6):
        done = run([program, str(seed), str(ROUNDS)], RUN_TIMEOUT_S)
        assert done.returncode == 0, done.stdout
        assert f"ok: {ROUNDS} rounds" in done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_noticed(builder, tmp_path, name):
    program = builder.build(planted(tmp_path, *MISTAKES[name]), tmp_path)
    try:
        done = run([program, "1", str(ROUNDS)], 60)
    except subprocess.TimeoutExpired:
        return  # a hang is noticed too
    print(done.stdout[:2000])
    assert done.returncode != 0, f"{name} went unnoticed"
