"""A tiny engine to build in tests, and processes that build it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pyringar.engine import build, toolchain
from pyringar.engine import load as _native
from pyringar.errors import CompilerNotFoundError

REPO = Path(__file__).resolve().parents[2]
MODULE_CPP = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "core/value.h"
#ifndef EXTRA
#define EXTRA 0
#endif
static PyObject* value(PyObject*, PyObject*) { return PyLong_FromLong(kValue + EXTRA); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_engine", "", -1, methods,
                             nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__engine() { return PyModule_Create(&module); }
"""
KERNEL_CU = """
#include <cuda_runtime.h>
#include "core/value.h"
namespace tiny {
template <typename T> __global__ void add(T* x) { x[threadIdx.x] += kValue; }
template __global__ void add<float>(float*);
}
cudaError_t launch(float* x) {
  tiny::add<float><<<1, 1>>>(x);
  return cudaGetLastError();
}
"""
CUDA_MODULE_CPP = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime_api.h>
cudaError_t launch(float* x);
static PyObject* count_error(PyObject*, PyObject*) {
  int count = 0;
  return PyUnicode_FromString(cudaGetErrorName(cudaGetDeviceCount(&count)));
}
static PyObject* launch_error(PyObject*, PyObject*) {
  return PyUnicode_FromString(cudaGetErrorName(launch(nullptr)));
}
static PyMethodDef methods[] = {{"count_error", count_error, METH_NOARGS, ""},
                                {"launch_error", launch_error, METH_NOARGS, ""},
                                {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda_engine", "", -1, methods,
                             nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__cuda_engine() { return PyModule_Create(&module); }
"""
# A process that imports the build alone (no torch: 0.1 s), builds a tiny engine and loads it.
CHILD = """
import importlib, pathlib, sys, types
package = types.ModuleType("pyringar")
package.__path__ = [sys.argv[1]]
sys.modules["pyringar"] = package
from pyringar.engine import build, load as _native
engine = build.ensure_engine(build.Recipe(pathlib.Path(sys.argv[2])))
print(engine.origin, _native.load(engine).value())
"""


def has_nvcc() -> bool:
    try:
        toolchain.find_nvcc()
    except CompilerNotFoundError:
        return False
    return True


needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)
needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no nvcc")


def run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str | Path) -> str:
    """Run a command, with none of the user's settings, and return what it printed."""
    variables = dict(os.environ)
    for name in list(variables):
        if name.startswith(("PYRINGAR_", "PYTHONPATH")) or name == "CXX":
            del variables[name]
    variables.update({name: str(value) for name, value in environment.items()})
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def child(recipe: build.Recipe, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start CHILD; ``before``: arguments of a Python that starts it in turn."""
    arguments = [*before, "-c", CHILD, str(REPO / "pyringar"), str(recipe.source_root)]
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def load(recipe: build.Recipe) -> Any:
    return _native.load(build.ensure_engine(recipe))


def value_of(engine: build.Engine) -> str:
    """Load the engine in a process of its own: one process loads one engine."""
    code = (
        "import importlib.util as util, sys; "
        "spec = util.spec_from_file_location('_engine', sys.argv[1]); "
        "module = util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(module.value())"
    )
    command = [sys.executable, "-c", code, str(engine.path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("*/tmp-*"))


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and ") Z " in status.read_text())
