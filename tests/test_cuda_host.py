"""The CUDA engine's host code on a model of CUDA's runtime, also with mistakes planted.

`tests/cpp/cuda_model` is a CUDA runtime on the host's memory: streams run late and in any order
that CUDA allows, and every access is checked for races. The engine's own host code and kernels run
on it. A rule of the model is tested by the planted mistakes that break it. All are slow.
"""

from __future__ import annotations

import pytest
from cuda_model import Builder, check_noticed, check_right
from test_cuda_emulated import Mistake
from test_stress import COMPILE_TIMEOUT_S, CSRC, RUN_TIMEOUT_S, STRESS, some

pytestmark = pytest.mark.slow

# Those in which mistakes are planted, and what includes them.
PARTS = "background devices folds group ring_links runtime staging"
CHANGING = [CSRC / f"cuda/{part}.cpp" for part in PARTS.split()]
ROUNDS = 24

MISTAKES = {
    "one-device-does-all": Mistake(
        "table.h", "kSliceElems, num_devices, d);", "kSliceElems, 1, d == 0 ? 0 : 1);"
    ),
    "failures-unread-at-the-end": Mistake(
        "group.cpp", "  if (failure.empty()) return;\n  failure_ = failure;", "  return;"
    ),
    "begins-before-the-others": Mistake(
        "group.cpp", "  meeting.meet(streams);\n  run_and_always", "  run_and_always"
    ),
    "leaves-before-the-others": Mistake("group.cpp", "[&] { meeting.meet(streams); }", "[] {}"),
    "meets-half": Mistake(
        "devices.cpp", "    events_[d].make_wait(streams[0], devices_[0]);\n", ""
    ),
    "staging-out-of-turn": Mistake(
        "group.cpp",
        "  last_use_->make_wait(streams);\n  run_and_always(",
        "  run_and_always(",
    ),
    "staging-free-too-early": Mistake(
        "group.cpp",
        "streams);\n      },\n      [&] { last_use_->record(streams); });",
        "streams);\n      },\n      [] {});",
    ),
    "failed-rings-out-of-turn": Mistake(
        "group.cpp",
        "return run_and_always(launch, [&] { last_use_->record(streams); });",
        "return launch(), last_use_->record(streams);",
    ),
    "background-not-awaited": Mistake("background.cpp", "    last_->wait_for();\n", ""),
    "rings-out-of-turn": Mistake(
        "group.cpp",
        "  last_use_->make_wait(streams);\n  const auto launch",
        "  const auto launch",
    ),
    "freed-under-way": Mistake("group.cpp", "    last_use_->wait_for();\n", ""),
    "broken-captures-are-none": Mistake("runtime.cpp", "return kBrokenCapture;", "return 0;"),
    "captures-any": Mistake("group.cpp", "if (capture == 0) return;", "return;"),
    "loaded-by-the-launch": Mistake(
        "devices.cpp",
        'check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes", device.index);',
        "",
    ),
    "launches-not-in-turn": Mistake("staging.cpp", "  const auto lock = lock_launches();\n", ""),
    "asked-in-captures": Mistake(
        "runtime.cpp",
        "  const BesideCaptures beside;\n  const cudaError_t status = cudaEventQuery",
        "  const cudaError_t status = cudaEventQuery",
    ),
    "released-in-captures": Mistake(
        "runtime.cpp", "    const BesideCaptures beside;\n    give_back", "    give_back"
    ),
    "stray-contexts": Mistake("runtime.cpp", "if (has_context(before_)) {", "if (device >= 0) {"),
    "ports-on-their-way": Mistake(
        "ring_links.cpp",
        '  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize", device.index);\n',
        "",
    ),
    "staging-no-peer-reaches": Mistake(
        "staging.cpp",
        "shared_memory(devices_.of_rank(rank), devices_.has_peers(), wanted)",
        "device_memory(devices_.of_rank(rank), wanted)",
    ),
    "slots-no-peer-reaches": Mistake(
        "devices.cpp", ": host_memory(device, bytes)", ": device_memory(device, bytes)"
    ),
    "buffers-freed-under-way": Mistake("staging.cpp", "last_use.wait_for();", ""),
    "failed-call-runs-on": Mistake(
        "background.cpp", "    wait_for();  // the caller", "    // the caller"
    ),
    "capture-of-others-joined": Mistake(
        "background.cpp", "if (other == 0 || other == capture) continue;", "continue;"
    ),
    "aborted-ring-waits": Mistake("group.cpp", "  if (ring_ != nullptr) ring_->abort();\n", ""),
    "asked-again-for-peers": Mistake(
        "group.cpp", "if (!collective.needs_staging) collective", "collective"
    ),
    "gradients-of-now": Mistake("background.cpp", "if (bucket.ready != nullptr) {", "if (false) {"),
    "gradient-again-unseen": Mistake(
        "background.cpp",
        "  if (!is_new) return found->event->record(stream);\n",
        "  if (!is_new) return;\n",
    ),
}


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    return Builder(folder, STRESS / "cuda_host", CHANGING)


@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
def test_group_on_runtime_model(builder):
    check_right(builder.build(), ROUNDS)


@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", some(MISTAKES, "leaves-before-the-others", "gradients-of-now"))
def test_planted_mistake_is_noticed(builder, tmp_path, name):
    mistake = MISTAKES[name]
    program = builder.build(name, mistake.plant(tmp_path), f"cuda/{mistake.file}")
    check_noticed(program, ROUNDS, name)
