"""What nvcc made of the CUDA kernels: registers, spills, loads in flight, fences, by kernel.

    python tests/build/cuda_sass.py [--csrc DIR] [--arch 9.0] [WORD ...]

prints a table of the kernels whose names hold all words, for `docs/cuda-kernels.md`. It needs nvcc,
and no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pyringar.engine import compile as _compile
from pyringar.engine import toolchain

CSRC = Path(__file__).parents[2] / "csrc"
# Of compute capability 9.0; registers are given out in eights, to a warp at a time.
REGISTERS, THREADS = 65_536, 2_048
# In the order of csrc/core/dtype.h.
DTYPES = ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a cubin, and what its instructions are.

    Attributes:
        loads_in_flight: The most 16-byte loads that follow each other before one of them is used.
        elements_in_flight: The most loads of single elements before one of them is used.
        wide_loads: 16-byte loads in all.
        fences: Of the device or the system; each is there once for either where it may be either.
        calls: Of divisions.
    """

    name: str
    registers: int
    spilled_bytes: int
    loads_in_flight: int
    elements_in_flight: int
    wide_loads: int
    wide_stores: int
    local_accesses: int
    fences: int
    barriers: int
    calls: int

    def blocks(self, threads: int) -> int:
        """Blocks of so many threads that the registers of a multiprocessor hold at once."""
        each = -(-self.registers // 8) * 8 * threads
        return min(REGISTERS // each, THREADS // threads)


def nvdisasm(folder: Path) -> Path:
    """Install the disassembler from pip: toolkits made for building come without.

    Raises:
        OSError: It cannot be installed; says why.
    """
    tools = folder / "tools"
    if not tools.exists():
        package = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        done = subprocess.run(
            [*package, str(tools), "nvidia-cuda-nvdisasm"], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise OSError(f"nvdisasm cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    program = next(tools.rglob("nvdisasm"))
    program.chmod(0o755)
    return program


def kernels_of(
    source: Path, folder: Path, *, arch: str = "9.0", csrc: Path = CSRC
) -> list[KernelCode]:
    """Compile one .cu file with the flags of the build, and read its kernels."""
    toolkit = toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
    cubin = folder / f"{source.stem}.cubin"
    command = [*toolkit.nvcc.command, *_compile.NVCC_FLAGS, f"-arch=sm_{arch.replace('.', '')}"]
    command += [f"-I{csrc}", "-cubin", "-o", str(cubin)]
    said = subprocess.run(
        [*command, str(source)], check=True, capture_output=True, text=True
    ).stderr
    sass = subprocess.run(
        [str(nvdisasm(folder)), "--print-code", str(cubin)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    _, *parts = re.split(r"^\.text\.(\S+):$", sass, flags=re.MULTILINE)
    names = toolchain.demangled(parts[::2])
    bodies = {
        names[name]: body.splitlines() for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
    return [_kernel_code(kernel, bodies[kernel.name]) for kernel in toolchain.kernels_in(said)]


def short_name(name: str) -> str:
    """Return "ring float32 Sum" for the name of a kernel as C++ writes it."""
    words = re.search(r"(\w+)_kernel<.*DType\)(\d)>, pyringar::cuda::(\w+)(?:.*Table<(\d+))?", name)
    if words is None:
        return name
    kind, dtype, op, pointers = words.groups()
    table = f", {pointers} pointers" if pointers else ""
    return f"{kind} {DTYPES[int(dtype)]} {op}{table}"


def _kernel_code(kernel: toolchain.Kernel, lines: list[str]) -> KernelCode:
    def count(pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in lines)

    return KernelCode(
        name=short_name(kernel.name),
        registers=kernel.registers,
        spilled_bytes=kernel.spill_store_bytes + kernel.spill_load_bytes,
        loads_in_flight=_loads_in_flight(lines, is_wide=True),
        elements_in_flight=_loads_in_flight(lines, is_wide=False),
        wide_loads=count(r"\bLDG\S*\.128"),
        wide_stores=count(r"\bSTG\S*\.128"),
        local_accesses=count(r"\b(LDL|STL)\b"),
        fences=count(r"\bMEMBAR\b"),
        barriers=count(r"\bBAR\."),
        calls=count(r"\bCALL\b.*_div_"),
    )


def _loads_in_flight(lines: Iterable[str], is_wide: bool) -> int:
    """The most loads whose results nothing has read yet, within straight code.

    Args:
        lines: A kernel's SASS.
        is_wide: Count loads of 16 bytes, else those of single elements.
    """
    most = 0
    under_way: list[range] = []
    for line in lines:
        if re.match(r"\.L", line) or re.search(r"\b(BRA|BAR|CALL|EXIT|RET|BSYNC)\b", line):
            under_way = []
            continue
        instruction = re.search(r"\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?);", line)
        if instruction is None:
            continue
        name, operands = instruction.groups()
        first, _, rest = operands.partition(",")
        read = rest if "STG" not in name else operands
        registers = {int(number) for number in re.findall(r"\bR(\d+)", read)}
        under_way = [load for load in under_way if not registers & set(load)]
        if "LDG" in name and (".128" in name) == is_wide:
            at = int(re.sub(r"\D", "", first))
            under_way.append(range(at, at + (4 if is_wide else 2 if ".64" in name else 1)))
            most = max(most, len(under_way))
    return most


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csrc", type=Path, default=CSRC)
    parser.add_argument("--arch", default="9.0")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    print(
        "| kernel | registers | spilled B | blocks | loads in flight | of elements "
        "| MEMBAR | BAR | divisions |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted((options.csrc / "cuda").glob("kernels_*.cu")):
            for kernel in kernels_of(file, Path(folder), arch=options.arch, csrc=options.csrc):
                if all(word in kernel.name.split() for word in options.words):
                    print(_row(kernel), flush=True)


def _row(kernel: KernelCode) -> str:
    threads = 512 if kernel.name.startswith("ring") else 256
    figures = (
        *(kernel.registers, kernel.spilled_bytes, kernel.blocks(threads)),
        *(kernel.loads_in_flight, kernel.elements_in_flight),
        *(kernel.fences, kernel.barriers, kernel.calls),
    )
    return f"| {kernel.name} | {' | '.join(map(str, figures))} |"


if __name__ == "__main__":
    main()
