"""Is the device code that nvcc emits right, in every order that PTX allows, without a device?"""

from __future__ import annotations

import re
import shutil

import model_mistakes
import pytest
import tables
from build_ptx import FAULTS, PARTS, Fault, build, run, write_ptx
from nvcc import needs_nvcc
from test_cuda_emulated import MISTAKES
from test_stress import some

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
pytestmark = [needs_compiler, pytest.mark.timeout(600)]

# Lines of the C++ emulation's own, what only the host reads, and who is the first to lose patience:
# that is a matter of speed, which the model has not.
NOT_IN_PTX = {"no-release", "no-acquire", "head-in-bytes", "tile-not-found"}
NOT_IN_PTX |= {"all-lose-patience-at-once", "every-divisor-multiplied"}
# The dtype that shows a mistake, where another one than fp32 (or, in a ring, int32) does.
DTYPE_OF = {
    "rounded-twice": "float16",
    "batches-overlap": "bfloat16",
    "divisor-as-an-element": "int8",
}

QUICK = [part for part in PARTS if part not in ("ring-all", "ring-orders")]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program that runs PTX."""
    return build(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """A folder with the PTX of all kernels."""
    return write_ptx(tmp_path_factory.mktemp("ptx"))


@pytest.fixture(scope="module")
def oldest_ptx(tmp_path_factory):
    """The same for the oldest architecture that the engine is built for."""
    return write_ptx(tmp_path_factory.mktemp("oldest"), arch="75")


@pytest.mark.parametrize("part", ["litmus", "forms"])
def test_the_model_is_what_ptx_says(program, tmp_path, part):
    done = run(program, tmp_path, "--only", part)
    print(done.stdout)
    assert done.returncode == 0, done.stdout


def test_the_page_has_the_table_of_the_memory(program):
    assert tables.litmus_table(program) in tables.README.read_text(), "run: tables.py"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", model_mistakes.MISTAKES)
def test_a_mistake_in_the_model_is_noticed(program, tmp_path, name):
    wrong = model_mistakes.build_with(name, program, tmp_path)
    parts = ("litmus", "forms")
    found = (run(wrong, tmp_path, "--only", part).returncode == 1 for part in parts)
    assert any(found), f"{name} went unnoticed"


@needs_nvcc
@pytest.mark.parametrize("part", some(PARTS, *QUICK))
def test_kernels_give_the_right_bits_in_every_order(program, ptx, part):
    done = run(program, ptx, "--only", part, "--rounds", 300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"^{part} +\d+ rounds", done.stdout, re.MULTILINE)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
def test_the_oldest_architecture_has_the_same_bits(program, oldest_ptx, part):
    test_kernels_give_the_right_bits_in_every_order(program, oldest_ptx, part)


def check_noticed(program, ptx, part: str, said: str) -> None:
    done = run(program, ptx, "--only", part, "--rounds", 400)
    print(done.stdout)
    # 2: there is no such part. Anything else but 1 is a crash or a hang.
    assert done.returncode == 1, done.stdout
    assert said in done.stdout
    # A race between blocks comes with what led to it; in shared memory there may be nothing yet.
    if "a race on" in done.stdout and "shared memory" not in done.stdout:
        assert "their last strong accesses, in order:\n  device " in done.stdout


@needs_nvcc
@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_named(program, ptx, tmp_path, fault):
    check_noticed(program, fault.plant(tmp_path, ptx), fault.part, fault.said)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in NOT_IN_PTX])
def test_mistake_of_the_emulated_kernels_is_noticed(program, ptx, tmp_path, name):
    mistake = MISTAKES[name]
    part = "fused" if mistake.part == "fused-all" else mistake.part
    # Sums of whole numbers have no order.
    dtype = DTYPE_OF.get(name, "float32" if part.startswith("fused") else "int32")
    fault = Fault(name, mistake, "again: ", part, dtype)
    check_noticed(program, fault.plant(tmp_path, ptx), part, fault.said)
