"""Detection of CPU, compilers, CUDA toolkit, ninja and headers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pyringar.errors import BuildError, CompilerNotFoundError

_INIT = "PyInit_*"
EXPORTS_FILE = "exports.map"
EXPORTS = f"{{ global: {_INIT}; local: *; }};\n"

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
# Flags for instructions that all CPUs of the architecture have. Some compilers default to more.
_BASELINES = {"x86_64": "-march=x86-64", "aarch64": "-march=armv8-a"}
_INSTALL_COMPILER = (
    "Install one: Debian/Ubuntu `apt install g++`, Fedora/RHEL `dnf install gcc-c++`, "
    "macOS `xcode-select --install`, conda `conda install -c conda-forge cxx-compiler`; "
    "or name yours in CXX."
)

_SYSTEM_NVCC = "/usr/local/cuda/bin/nvcc"
_PIP_NVCC = "nvidia/cu13/bin/nvcc"  # path of pip's nvcc below site-packages
_INSTALL_CUDA = (
    "Install one: `pip install 'pyringar[cuda]'`, or the CUDA toolkit "
    "(https://developer.nvidia.com/cuda-downloads); or name your nvcc in PYRINGAR_NVCC."
)
_ALL_ARCHS = "all"
_OLDEST_ARCH = (7, 5)

# -- the processor and Python ----------------------------------------------------------------------


@dataclass(frozen=True)
class Cpu:
    """Architecture, model and instruction set of a CPU."""

    machine: str
    model: str
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        """The model's common name, if the system knows it."""
        _, found, name = self.model.partition("model name ")
        return name.partition(";")[0] if found else self.model


def read_cpu(cpuinfo: str = "/proc/cpuinfo") -> Cpu:
    """Read the model and the instruction set of this CPU from ``cpuinfo``.

    On x86 it reads only the first entry, since all cores are equal.
    """
    machine = platform.machine()
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
    known = [name for name in _CPUINFO_FIELDS if name in seen]
    model = "; ".join(f"{name} {' + '.join(sorted(seen[name]))}" for name in known)
    # Arm cores may differ: keep the features of all cores.
    entries = [set(entry.split()) for entry in seen.get("flags") or seen.get("Features") or ()]
    features_everywhere = set.intersection(*entries) if entries else set()
    return Cpu(machine, model, tuple(sorted(features_everywhere)))


def cores_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def libc_version() -> str:
    return " ".join(platform.libc_ver()).strip() or platform.release()


def extension_suffix() -> str:
    """Return the suffix of extension modules: ".cpython-311-x86_64-linux-gnu.so"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def cpu_flags(baseline: bool) -> list[str]:
    """Return the flag for this CPU; ``baseline``: for any CPU of this architecture."""
    machine = platform.machine()
    if baseline:
        return [_BASELINES[machine]] if machine in _BASELINES else []
    return ["-mcpu=native" if machine.lower() in ("aarch64", "arm64") else "-march=native"]


def link_flags() -> tuple[str, ...]:
    """Return the flags that link objects into an extension module.

    The module exports only its init function, by the version script `EXPORTS` in the current
    folder: the symbols of a static libstdc++ would mix with torch's shared one, and crash streams
    and locales.
    """
    if sys.platform == "darwin":
        return ("-bundle", "-undefined", "dynamic_lookup", f"-Wl,-exported_symbol,_{_INIT}")
    return ("-shared", f"-Wl,--version-script={EXPORTS_FILE}")


def find_ninja() -> str:
    found = shutil.which("ninja")
    with contextlib.suppress(ImportError):
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR) or found
    if found is None:
        raise BuildError(
            "ninja was not found, neither the Python package nor a program on PATH: "
            "`pip install ninja`"
        )
    return found


def python_include_dirs() -> list[str]:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"Python.h is not in {include}: the header files of Python {version} are missing. "
            f"Debian/Ubuntu `apt install python{version}-dev`, Fedora/RHEL `dnf install "
            f"python{version}-devel` (or python3-devel), others: the package that ends in -dev"
        )
    platinclude = sysconfig.get_path("platinclude")
    return list(dict.fromkeys([include, platinclude, _pybind11().get_include()]))


def pybind11_version() -> str:
    return str(_pybind11().__version__)


def _pybind11() -> ModuleType:
    try:
        return importlib.import_module("pybind11")
    except ImportError as error:
        raise BuildError(
            f"pybind11 cannot be imported ({error}): `pip install pybind11`"
        ) from error


# -- the C++ compiler ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """A compiler command, and path, size and modification time of its executables."""

    command: tuple[str, ...]
    identity: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.command)


def find_compiler() -> Compiler:
    """Find the C++ compiler: ``CXX`` (such as "ccache g++"), else c++, g++, clang++."""
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
            f"no C++ compiler: CXX is not set, and none of {', '.join(_COMPILER_NAMES)} is on "
            f"{_search_path()}. {_INSTALL_COMPILER}"
        )
    for word in words[: 1 + _has_launcher(words)]:
        if shutil.which(word) is None:
            raise _not_executable("CXX", wanted, word, _INSTALL_COMPILER)
    executables = [shutil.which(word) for word in words if not word.startswith("-")]
    identity = tuple(_stat_identity(path) for path in executables if path is not None)
    return Compiler(tuple(words), identity)


def _search_path() -> str:
    return f"PATH={os.environ.get('PATH', '')!r}"


def _not_executable(variable: str, value: str, word: str, hint: str) -> CompilerNotFoundError:
    return CompilerNotFoundError(
        f"{variable}={value!r}: {word!r} is not an executable file, nor one on {_search_path()}. "
        f"Correct or unset {variable}. {hint}"
    )


def _stat_identity(path: str) -> str:
    real = os.path.realpath(path)
    status = os.stat(real)
    return f"{real} {status.st_size} {status.st_mtime_ns}"


def _has_launcher(words: Sequence[str]) -> bool:
    return Path(words[0]).name in _LAUNCHERS


def compiler_version(compiler: Compiler) -> str:
    output = run_tool([*compiler.command, "--version"], "the compiler does not work")
    return output.strip().splitlines()[0] if output.strip() else "unknown version"


# -- CUDA ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaToolkit:
    """Paths, version and architectures of a CUDA toolkit.

    ``nvcc`` may be a wrapper script. ``includes``: folders of headers. ``cudart``: the path of
    libcudart_static.a. ``archs``: compute capabilities ("9.0").
    """

    nvcc: Compiler
    root: Path
    includes: tuple[Path, ...]
    cudart: Path
    version: str
    archs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.version} ({self.nvcc}, toolkit {self.root})"


def find_nvcc() -> Compiler:
    """Find nvcc: ``PYRINGAR_NVCC``, ``CUDA_HOME``, ``PATH``, /usr/local/cuda, pip's packages.

    Starts no process. Raises CompilerNotFoundError, also for a wrong ``PYRINGAR_NVCC``.
    """
    wanted = os.environ.get("PYRINGAR_NVCC", "").strip()
    if wanted and shutil.which(wanted) is None:
        raise _not_executable("PYRINGAR_NVCC", wanted, wanted, _INSTALL_CUDA)
    found = next(filter(None, map(shutil.which, _nvcc_places(wanted))), None)
    if found is None:
        home = os.environ.get("CUDA_HOME")
        raise CompilerNotFoundError(
            "no CUDA compiler: PYRINGAR_NVCC is not set, "
            f"{f'{home}/bin/nvcc is not there' if home else 'CUDA_HOME is not set'}, "
            f"nvcc is not on {_search_path()}, {_SYSTEM_NVCC} is not there, "
            f"and no pip package contains {_PIP_NVCC}. {_INSTALL_CUDA}"
        )
    path = os.path.abspath(found)
    return Compiler((path,), (_stat_identity(path),))


def _nvcc_places(wanted: str) -> Iterator[str]:
    if wanted:
        yield wanted
    if os.environ.get("CUDA_HOME"):
        yield os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc")
    yield "nvcc"
    yield _SYSTEM_NVCC
    package, _, inside = _PIP_NVCC.partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield os.path.join(folder, inside)


def nvcc_host_flags(host: Compiler) -> tuple[str, ...]:
    words = host.command[_has_launcher(host.command) :]
    return ("-ccbin", shutil.which(words[0]) or words[0]) if len(words) == 1 else ()


def read_cuda_toolkit(nvcc: Compiler, host: Compiler) -> CudaToolkit:
    """Run nvcc, with the host compiler, to read its folders, version and architectures."""

    def ask(*arguments: str) -> str:
        return run_tool([*nvcc.command, *arguments], f"{nvcc} does not work", hint=_INSTALL_CUDA)

    said = ask(*nvcc_host_flags(host), "--dryrun", "-x", "cu", "-E", os.devnull)
    settings = dict(re.findall(r"^#\$ (\w+)=(.*)$", said, re.MULTILINE))
    if "TOP" not in settings:
        raise BuildError(f"{nvcc} does not say where its toolkit is (TOP=). {_INSTALL_CUDA}")
    root = Path(os.path.realpath(settings["TOP"].strip()))
    includes = _folders(settings, ("INCLUDES", "SYSTEM_INCLUDES"), root / "include")
    libraries = _folders(settings, ("LIBRARIES",), root / "lib64", root / "lib")
    # A distribution's nvcc may have its headers in /usr/include, which all compilers search.
    _first_with("cuda_runtime.h", [*includes, Path("/usr/include")], nvcc)
    cudart = _first_with("libcudart_static.a", libraries, nvcc) / "libcudart_static.a"
    version = re.search(r"release [\d.]+, V([\d.]+)", ask("--version"))
    codes = re.findall(r"^sm_(\d+)(\d)$", ask("--list-gpu-code"), re.MULTILINE)
    known = sorted((int(major), int(minor)) for major, minor in codes)
    archs = tuple(f"{arch[0]}.{arch[1]}" for arch in known if arch >= _OLDEST_ARCH)
    if version is None or not archs:
        raise BuildError(f"{nvcc} tells no version, or no GPU it makes code for. {_INSTALL_CUDA}")
    return CudaToolkit(nvcc, root, includes, cudart, version[1], archs)


def _folders(settings: Mapping[str, str], names: Sequence[str], *usual: Path) -> tuple[Path, ...]:
    words = (word for name in names for word in shlex.split(settings.get(name, "")))
    named = (word.removeprefix("-I").removeprefix("-L") for word in words if word != "-isystem")
    real = (folder.resolve() for folder in (*map(Path, named), *usual))
    return tuple(dict.fromkeys(folder for folder in real if folder.is_dir()))


def _first_with(file: str, folders: Sequence[Path], nvcc: Compiler) -> Path:
    for folder in folders:
        if (folder / file).is_file():
            return folder
    looked = ", ".join(map(str, folders)) or "no folder at all"
    raise BuildError(f"{nvcc} is there, but {file} is not: looked in {looked}. {_INSTALL_CUDA}")


def cuda_archs_wanted() -> tuple[str, ...]:
    """Return the architectures of the CUDA engine: ("8.0", "9.0+PTX") or ("all",).

    ``PYRINGAR_CUDA_ARCHS`` names them. Default: the GPUs of this machine if torch is imported and
    finds GPUs, else all architectures of nvcc.
    """
    chosen = os.environ.get("PYRINGAR_CUDA_ARCHS", "")
    archs = set(filter(None, re.split(r"[;,\s]+", chosen))) or _archs_of_gpus() or {_ALL_ARCHS}
    for arch in sorted(archs):
        if re.fullmatch(r"[0-9]{1,3}\.[0-9](\+PTX)?", arch) is None and archs != {_ALL_ARCHS}:
            raise BuildError(
                f"PYRINGAR_CUDA_ARCHS={chosen!r}: {arch!r} is not a compute capability. Expected "
                "some, such as '9.0' or '8.0;9.0+PTX' (+PTX: newer GPUs too), or 'all'"
            )
    archs -= {arch.removesuffix("+PTX") for arch in archs if arch.endswith("+PTX")}
    return tuple(sorted(archs, key=lambda arch: [*map(int, re.findall(r"\d+", arch))]))


def _archs_of_gpus() -> set[str]:
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None or not torch.cuda.is_available():
        return set()
    found = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return {f"{major}.{minor}" for major, minor in found}


def cuda_archs_built(wanted: Sequence[str], toolkit: CudaToolkit) -> tuple[str, ...]:
    """Return ``wanted`` with "all" expanded; BuildError if nvcc does not know one of them."""
    if tuple(wanted) == (_ALL_ARCHS,):
        return (*toolkit.archs[:-1], f"{toolkit.archs[-1]}+PTX")
    unknown = [arch for arch in wanted if arch.removesuffix("+PTX") not in toolkit.archs]
    if unknown:
        raise BuildError(
            f"nvcc {toolkit} makes no code for compute capability {', '.join(unknown)}, but for "
            f"{', '.join(toolkit.archs)}. Name some of these in PYRINGAR_CUDA_ARCHS "
            f"('{toolkit.archs[-1]}+PTX' serves newer GPUs too), or use another toolkit"
        )
    return tuple(wanted)


def cuda_archs_cover(built: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether an engine built for ``built`` holds machine code for all of ``wanted``."""
    there = {*built, *(arch.removesuffix("+PTX") for arch in built), _ALL_ARCHS}
    return there.issuperset(wanted)


def gencode_flags(archs: Sequence[str]) -> list[str]:
    flags: list[str] = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if arch.endswith("+PTX"):
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


# -- running tools ---------------------------------------------------------------------------------


def run_tool(command: Sequence[str], complaint: str, *, hint: str = _INSTALL_COMPILER) -> str:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{complaint}: {error}\n  {hint}") from error
    if done.returncode != 0:
        raise BuildError(
            f"{complaint}: `{shlex.join(command)}` ended with status {done.returncode} and said\n"
            f"{indent(done.stdout.splitlines()[-15:])}\n  {hint}"
        )
    return str(done.stdout)


def indent(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) if lines else "    (nothing)"
