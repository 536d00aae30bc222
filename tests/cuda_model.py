"""Builds the CUDA engine's host code on `tests/cpp/cuda_model`, also with a mistake planted."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from nvcc import cuda_includes
from test_cuda_emulated import EMULATED, FLAGS, PLAIN, below, kernel_units
from test_stress import BASE_FLAGS, CSRC, RUN_TIMEOUT_S, STRESS, compile_all, require, run

MODEL = STRESS / "cuda_model"
COMMON = [
    EMULATED / "cuda_emulator.cpp",
    STRESS / "check.cpp",
    STRESS / "oracle.cpp",
    STRESS / "stress.cpp",
    *sorted(MODEL.glob("*.cpp")),
]
# Calls of memcpy are seen by the model.
OWN_FLAGS = ("-fno-builtin-memcpy", "-Wno-psabi")
HANGS_AFTER_S = 150  # four times what a program without a mistake takes
LINK = ("g++", "-pthread", "-Wl,--wrap=memcpy")

_common: list[Path] = []  # once a process


class Builder:
    """Compiles everything once, and again what a mistake changes.

    Args:
        folder: For object files.
        here: The folder of the test.
        changing: Sources of the engine in which mistakes are planted, or in what they include.
        constant: Its other sources.
    """

    def __init__(
        self, folder: Path, here: Path, changing: Sequence[Path], constant: Sequence[Path] = ()
    ) -> None:
        require("g++")
        includes = [f"-I{path}" for path in (STRESS, EMULATED, MODEL, here)]
        includes += [f"-isystem{path}" for path in cuda_includes()]
        self.compiler = [*includes, *FLAGS, *PLAIN.flags, *OWN_FLAGS, "-x", "c++"]
        self.folder = folder
        self.changing = dict(zip(changing, self.compile(changing, CSRC, "changing"), strict=True))
        self.constant = self.compile([*constant, *sorted(here.glob("*.cpp"))], CSRC, "constant")
        if not _common:
            common = [*COMMON, *kernel_units(folder)]
            _common.extend(self.compile(common, CSRC, "common"))

    def compile(self, sources: Sequence[Path], csrc: Path, folder: str, *more: str) -> list[Path]:
        (self.folder / folder).mkdir()
        objects = [self.folder / folder / f"{i}_{s.name}.o" for i, s in enumerate(sources)]
        # BASE_FLAGS name CSRC, after the copy that has a mistake.
        compiler = ["g++", f"-I{csrc}", *BASE_FLAGS, *self.compiler, *more]
        compile_all(
            [
                [*compiler, "-c", below(csrc, source), "-o", o]
                for source, o in zip(sources, objects, strict=True)
            ]
        )
        return objects

    def build(self, name: str = "right", csrc: Path = CSRC, mutated: str = "") -> Path:
        objects = dict(self.changing)
        if mutated:
            is_own = CSRC / mutated in objects
            assert is_own or not mutated.endswith(".cpp"), f"{mutated} is not among `changing`"
            own = [CSRC / mutated] if is_own else list(objects)
            # A mistake may leave a variable that nobody reads.
            objects.update(zip(own, self.compile(own, csrc, name, "-w"), strict=True))
        return self.link([*objects.values(), *self.constant, *_common], name)

    def link(self, objects: Sequence[Path], name: str) -> Path:
        program = self.folder / f"{name}_test"
        compile_all([[*LINK, *objects, "-ldl", "-o", program]])
        return program


def options(seed: int, rounds: int) -> list[str]:
    return ["--seed", str(seed), "--rounds", str(rounds)]


def check_noticed(program: Path, rounds: int, name: str) -> None:
    for seed in range(1, 13):  # of a missing lock each seed notices half
        try:
            done = run([program, *options(seed, rounds)], HANGS_AFTER_S)
        except subprocess.TimeoutExpired:
            return
        print(done.stdout[:2000])
        if done.returncode != 0:
            return
    raise AssertionError(f"{name} went unnoticed")


def check_right(program: Path, rounds: int) -> None:
    for seed in range(1, 4):
        done = run([program, *options(seed, rounds)], RUN_TIMEOUT_S)
        assert done.returncode == 0, done.stdout
