"""What this machine is and has, as far as building the engine goes: CPU, compiler, ninja, headers.

Reads and asks; writes nothing but what a compiler it tries writes.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.errors import BuildError, CompilerNotFoundError

__all__ = [
    "Compiler",
    "Cpu",
    "compiler_version",
    "cores_allowed",
    "extension_suffix",
    "find_compiler",
    "find_ninja",
    "indent",
    "libc_version",
    "link_flags",
    "pybind11_version",
    "python_include_dirs",
    "read_cpu",
    "run_tool",
    "tuning_flags",
]

_COMPILER_NAMES = ("c++", "g++", "clang++")
_LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")
_CPUINFO_FIELDS = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "uarch",
    "isa",
)
_INSTALL_COMPILER = (
    "Install one: Debian/Ubuntu `apt install g++`, Fedora/RHEL `dnf install gcc-c++`, "
    "macOS `xcode-select --install`, conda `conda install -c conda-forge cxx-compiler`; "
    "or name yours in CXX."
)


@dataclass(frozen=True)
class Cpu:
    """This CPU, as far as it decides which machine code it can run."""

    machine: str
    model: str
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        """The model as people say it, where the system tells."""
        _, found, name = self.model.partition("model name ")
        return name.partition(";")[0] if found else self.model

    def runs_code_for(self, other: Mapping[str, Any]) -> bool:
        """Say whether code compiled with ``-march=native`` on ``other`` runs here."""
        if self.machine != other["machine"]:
            return False
        if not self.features or not other["features"]:
            return bool(self.model == other["model"])
        return set(other["features"]) <= set(self.features)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command as words, and what tells it from another one.

    ``identity`` is path, size and time of each executable in the command, links followed. A
    stat takes microseconds where ``--version`` takes tens of milliseconds, and every load needs
    it. An upgrade changes it; a compiler behind a wrapper script that stays the same does not.
    """

    command: tuple[str, ...]
    identity: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.command)


def read_cpu(cpuinfo: str = "/proc/cpuinfo") -> Cpu:
    """Read model and instruction set features of this CPU.

    Linux: ``cpuinfo``, on x86 its first entry only (all are alike, and the file grows with the
    cores). macOS: sysctl. Elsewhere the model is all there is.
    """
    machine = platform.machine()
    if sys.platform == "darwin":
        names = ("machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features")
        brand, *features = (_sysctl(name) for name in names)
        return Cpu(machine, brand, tuple(sorted(" ".join(features).lower().split())))
    seen: dict[str, set[str]] = {}
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if not name.strip() and "flags" in seen:
                    break
                if value.strip():
                    seen.setdefault(name.strip(), set()).add(value.strip())
    except OSError:
        return Cpu(machine, platform.processor(), ())
    model = "; ".join(
        f"{name} {' + '.join(sorted(seen[name]))}" for name in _CPUINFO_FIELDS if name in seen
    )
    # Cores of different kinds (Arm): only what all of them have may be used.
    entries = [set(entry.split()) for entry in seen.get("flags") or seen.get("Features") or ()]
    features_everywhere = set.intersection(*entries) if entries else set()
    return Cpu(machine, model, tuple(sorted(features_everywhere)))


def _sysctl(name: str) -> str:
    """Return a string value of macOS's sysctl, "" where it has none; no process is started."""
    import ctypes

    libc = ctypes.CDLL(None)
    size = ctypes.c_size_t(0)
    if libc.sysctlbyname(name.encode(), None, ctypes.byref(size), None, 0) != 0:
        return ""
    value = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name.encode(), value, ctypes.byref(size), None, 0) != 0:
        return ""
    return value.value.decode(errors="replace")


def cores_allowed() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def libc_version() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return platform.release() if sys.platform == "darwin" else ""


def extension_suffix() -> str:
    """Return e.g. ".cpython-311-x86_64-linux-gnu.so": Python version, ABI and platform in one."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return str(suffix) if suffix else ".so"


def tuning_flags() -> tuple[str, ...]:
    """Return the flag that means "this very CPU"; the build drops it where the compiler refuses."""
    on_arm = platform.machine().lower() in ("aarch64", "arm64")
    return ("-mcpu=native",) if on_arm else ("-march=native",)


def link_flags() -> tuple[str, ...]:
    if sys.platform == "darwin":
        return ("-bundle", "-undefined", "dynamic_lookup")
    return ("-shared",)


def find_compiler() -> Compiler:
    """Find the C++ compiler: ``CXX`` (may hold arguments, "ccache g++"), else c++, g++, clang++.

    Raises:
        CompilerNotFoundError: there is none; a ``CXX`` that does not exist is not passed over.
    """
    wanted = os.environ.get("CXX", "").strip()
    try:
        words = shlex.split(wanted)
    except ValueError as error:
        raise CompilerNotFoundError(
            f"CXX={wanted!r} cannot be read as a command: {error}"
        ) from error
    if not words:
        words = next(([name] for name in _COMPILER_NAMES if shutil.which(name)), [])
        if not words:
            raise CompilerNotFoundError(
                "no C++ compiler: CXX is not set, and none of "
                f"{', '.join(_COMPILER_NAMES)} is on PATH={os.environ.get('PATH', '')!r}. "
                + _INSTALL_COMPILER
            )
    needed = words[:2] if Path(words[0]).name in _LAUNCHERS else words[:1]
    for word in needed:
        if shutil.which(word) is None:
            raise CompilerNotFoundError(
                f"CXX={wanted!r}: {word!r} is not an executable file, nor one on "
                f"PATH={os.environ.get('PATH', '')!r}. Correct or unset CXX. " + _INSTALL_COMPILER
            )
    executables = [shutil.which(word) for word in words if not word.startswith("-")]
    identity = tuple(_stat_identity(path) for path in executables if path is not None)
    return Compiler(tuple(words), identity)


def _stat_identity(path: str) -> str:
    real = os.path.realpath(path)
    status = os.stat(real)
    return f"{real} {status.st_size} {status.st_mtime_ns}"


def compiler_version(compiler: Compiler) -> str:
    """Run ``--version`` and return its first line.

    Raises:
        BuildError: the compiler cannot be run, or fails at this already.
    """
    output = run_tool([*compiler.command, "--version"], "the compiler does not work")
    return output.strip().splitlines()[0] if output.strip() else "unknown version"


def find_ninja() -> str:
    """Return the path of ninja: the one of the ``ninja`` package, else the one on PATH.

    Raises:
        BuildError: there is neither.
    """
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        packaged = shutil.which("ninja", path=ninja.BIN_DIR)
        if packaged is not None:
            return packaged
    on_path = shutil.which("ninja")
    if on_path is None:
        raise BuildError(
            "ninja was not found, neither the Python package nor a program on PATH: "
            "`pip install ninja`"
        )
    return on_path


def python_include_dirs() -> list[str]:
    """Return the include folders of Python and pybind11.

    Raises:
        BuildError: ``Python.h`` or pybind11 is not installed; says which package brings it.
    """
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"Python.h is not in {include}: the header files of Python {version} are missing. "
            f"Debian/Ubuntu `apt install python{version}-dev`, Fedora/RHEL `dnf install "
            f"python{version}-devel` (or python3-devel), others: the package that ends in -dev"
        )
    try:
        import pybind11
    except ImportError as error:
        raise BuildError(
            f"pybind11 cannot be imported ({error}): `pip install pybind11`"
        ) from error
    return list(dict.fromkeys([include, sysconfig.get_path("platinclude"), pybind11.get_include()]))


def pybind11_version() -> str:
    """Return the version of pybind11.

    Raises:
        BuildError: it is not installed.
    """
    try:
        import pybind11
    except ImportError as error:
        raise BuildError(
            f"pybind11 cannot be imported ({error}): `pip install pybind11`"
        ) from error
    return str(pybind11.__version__)


def run_tool(command: Sequence[str], complaint: str, **options: Any) -> str:
    """Run a short command and return its output; a failure becomes a BuildError with all of it."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
            text=True,
            errors="replace",
            **options,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{complaint}: {error}\n  {_INSTALL_COMPILER}") from error
    if done.returncode != 0:
        raise BuildError(
            f"{complaint}: `{shlex.join(command)}` ended with status {done.returncode} and said\n"
            f"{indent(done.stdout.splitlines()[-15:])}\n  {_INSTALL_COMPILER}"
        )
    return str(done.stdout)


def indent(lines: Sequence[str]) -> str:
    """Return the lines of a tool's output as a block that stands out in a message."""
    return "\n".join(f"    {line}" for line in lines) if lines else "    (nothing)"
