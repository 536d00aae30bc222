"""Are ranks in processes with GPUs right, all below Python, on devices that are host memory?

Everything below Python, bit for bit against the oracle: the kernels' own source, slots and words
on streams of a modelled runtime, which run as late and as far out of order as CUDA allows, and
ranks that die, are late or fail. Then with mistakes planted, each of which must be noticed. All are
slow, and all but a few rounds thorough.
"""

from __future__ import annotations

import pytest
from cuda_model import Builder, check_noticed, check_right
from test_cuda_emulated import planted
from test_stress import COMPILE_TIMEOUT_S, CSRC, ENGINE_SOURCES, RUN_TIMEOUT_S, STRESS

pytestmark = pytest.mark.slow

# Those in which mistakes are planted, and what includes them.
CHANGING = [
    *(CSRC / f"cuda/{name}.cpp" for name in ("folds", "runtime")),
    *(CSRC / f"cuda_process/{name}.cpp" for name in ("device_watch", "staging", "group")),
]
ROUNDS = 40

STAGING = "cuda_process/staging.h"
GROUP, WATCH = "cuda_process/group.cpp", "cuda_process/device_watch.cpp"
STAGED = "cuda_process/staging.cpp"
PROGRAM = "core/staged_program.h"
MISTAKES = {
    # -- words and slots
    "announced-not-awaited": (GROUP, {"    staging_.await_announced(n, stream_);\n": ""}),
    "reduced-not-awaited": (GROUP, {"    staging_.await_reduced(n, stream_);\n": ""}),
    "word-before-copy": (
        PROGRAM,
        {
            "  engine.copy_in(0, n);\n  engine.announce(n);\n": "  engine.announce(n);\n"
            "  engine.copy_in(0, n);\n",
            "      engine.copy_in(piece + 1, n + 1);\n      engine.announce(n + 1);\n": ""
            "      engine.announce(n + 1);\n      engine.copy_in(piece + 1, n + 1);\n",
        },
    ),
    "stream-before-host": (
        GROUP,
        {
            "    if (!StagedCounters::wait_announced(n)) return false;\n": "",
            "    staging_.await_announced(n, stream_);\n    return true;": "    "
            "staging_.await_announced(n, stream_);\n    return StagedCounters::wait_announced(n);",
        },
    ),
    "awaits-equality": (
        "cuda_process/staging.cpp",
        {"CU_STREAM_WAIT_VALUE_GEQ": "CU_STREAM_WAIT_VALUE_EQ"},
    ),
    "written-without-a-fence": (
        "cuda_process/staging.cpp",
        {"CU_STREAM_WRITE_VALUE_DEFAULT": "CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER"},
    ),
    "reduced-stays-behind": (
        STAGED,
        {"  if (is_far_behind) staging_.write_reduced(last_, stream_);\n": ""},
    ),
    "slot-too-few": (STAGING, {"message % kStagingSlots * own": "message % 3 * own"}),
    "end-not-recorded": (STAGED, {"  staging_.last_call_.record(stream_);\n": ""}),
    "reducer-waits-for-nobody": (
        STAGING,
        {
            "    watch_->expect_announced(message);\n": "    if (plan().shares_gpu && rank_ == 0) "
            "return;\n    watch_->expect_announced(message);\n"
        },
    ),
    # -- ranks that are lost or late
    "not-released-after-death": (WATCH, {"  release(culprit);\n": ""}),
    "released-whatever-fails": (
        WATCH,
        {
            "const char* how = host_.how_gone(rank)": "const char* how = "
            'host_.shared_failure().empty() ? host_.how_gone(rank) : "failed"'
        },
    ),
    "void-not-kept": (
        WATCH,
        {
            "  line.released.compare_exchange_strong(none, kIsReleased | "
            "value_of(line.finished));\n": ""
        },
    ),
    "raised-only-below": (WATCH, {"!reached(now, wanted) &&": "now < wanted &&"}),
    "late-not-noticed": (WATCH, {"!stillness_.is_late(culprit)) return": "culprit < 999) return"}),
    "busy-is-late": (WATCH, {" || lead(rank_, culprit) <= 0)": ")"}),
    "void-not-told": (GROUP, {"    raise_untold();\n": ""}),
    "let-go-while-busy": (GROUP, {"is_idle = !is_left_running(*host_);": "is_idle = true;"}),
    "closes-in-its-own-close": (
        GROUP,
        {"  const Turn::Held turn = close_turn_.take(options_.on_nap);\n": ""},
    ),
    # -- one rank's own
    "not-after-the-caller": (GROUP, {"        ready->make_wait(stream_->get(), device_);\n": ""}),
    "abort-waits-for-calls": (
        GROUP,
        {"  if (leaving == Leaving::kAborting) release_streams();\n": ""},
    ),
    "freed-while-open": (GROUP, {"!(is_idle && all_others_are_gone(*host_))) {": "false) {"}),
    "unmapped-while-read": (GROUP, {"staging_ == nullptr || wait_until_idle(patience)": "true"}),
    "capture-unseen": (
        GROUP,
        {"if (!cuda::is_capturing(stream, device_))": "if (stream != nullptr || device_ >= 0)"},
    ),
    "failed-call-counts-as-done": (
        GROUP,
        {"[&] { done->record": "[&] { if (is_enqueued) done->record"},
    ),
    "probe-unread": (STAGED, {"found != wanted": "false"}),
    "bits-not-kept": (
        "cuda/folds.cpp",
        {"as = copied_as(item_bytes(dtype));": "as = bytes > 0 ? dtype : copied_as(1);"},
    ),
}


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return Builder(
        folder, STRESS / "cuda_processes", CHANGING, [*ENGINE_SOURCES, STRESS / "process_calls.cpp"]
    )


@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("rounds", [10, pytest.param(ROUNDS, marks=pytest.mark.thorough)])
def test_processes_on_runtime_model(builder, rounds):
    check_right(builder.build(), rounds)


@pytest.mark.thorough
@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistake_is_noticed(builder, tmp_path, name):
    file, edits = MISTAKES[name]
    check_noticed(builder.build(name, planted(tmp_path, file, edits), file), ROUNDS, name)
