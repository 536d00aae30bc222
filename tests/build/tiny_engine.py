"""Sources of tiny engines for tests of builds, and functions that build and load them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyringar.engine import build
from pyringar.engine.load import load as load_engine
from pyringar.errors import BuildError

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
# First lines of a program that imports pyringar.engine without torch, in 0.1 s. PACKAGE is the
# first argument of the program.
BUILD_ALONE = """
import os, sys, types
from pathlib import Path
package = types.ModuleType("pyringar")
package.__path__ = [sys.argv[1]]
sys.modules["pyringar"] = package
from pyringar.engine import build, load
"""
PACKAGE = str(REPO / "pyringar")
# Program that builds a tiny engine and loads it.
CHILD = (
    BUILD_ALONE
    + """
engine = build.ensure_engine(build.Recipe(Path(sys.argv[2])))
print(engine.origin, load.load(engine).value())
"""
)


needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)
COMPILERS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"no {name}"))
    for name in ("g++", "clang++")
]


def run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str | Path) -> str:
    variables = dict(os.environ)
    for name in list(variables):
        if name.startswith(("PYRINGAR_", "PYTHONPATH")) or name == "CXX":
            del variables[name]
    variables.update({name: str(value) for name, value in environment.items()})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=variables, **streams)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def child(recipe: build.Recipe) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, PACKAGE, str(recipe.source_root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def script(path: Path, lines: str) -> Path:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


def set_value(recipe: build.Recipe, value: int) -> None:
    text = f"#pragma once\ninline constexpr long kValue = {value};\n"
    (recipe.root() / "core/value.h").write_text(text)


def load(recipe: build.Recipe) -> Any:
    return load_engine(build.ensure_engine(recipe))


def refusal(recipe: build.Recipe, error: type[Exception] = BuildError) -> str:
    with pytest.raises(error) as caught:
        build.ensure_engine(recipe)
    return str(caught.value)


def value_of(engine: build.Engine) -> str:
    """Load the engine in a new process, since a process loads one engine."""
    code = BUILD_ALONE + "print(load.load(build.Engine(Path(sys.argv[2]), 'cache', {})).value())"
    return run(sys.executable, "-c", code, PACKAGE, engine.path, cwd=REPO).strip()


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("tmp-*"))


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition was false for {seconds} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and ") Z " in status.read_text())
