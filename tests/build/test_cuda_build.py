"""Building the CUDA engine: nvcc, architectures, cache keys, the build command.

No test needs a GPU. Tests that compile need nvcc and use a tiny engine.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from nvcc import needs_nvcc
from tiny_engine import BUILD_ALONE, REPO, needs_compiler, run

from pyringar.cli import main
from pyringar.engine import build as _build
from pyringar.engine import compile as _compile
from pyringar.engine import load, toolchain
from pyringar.errors import BuildError, CompilerNotFoundError


@pytest.fixture
def no_nvcc(cache, monkeypatch):
    monkeypatch.setattr(toolchain, "_nvcc_places", lambda wanted: iter(()))


@pytest.fixture
def nvcc_in(tmp_path):
    def make(folder):
        path = tmp_path / folder / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    return make


# --- build, load, key ---


@needs_compiler
@needs_nvcc
def test_cuda_engine_imports_without_gpu(cache, tiny_cuda, unloaded, monkeypatch):
    built = _build.ensure_engine(tiny_cuda)
    assert built.path.name == f"_cuda_engine{toolchain.extension_suffix()}"
    assert built.record["archs"] == ["9.0"]
    assert _build.ensure_engine(tiny_cuda).origin == "cache"
    # The engine's CUDA runtime must not mix with torch's: it is static and exports nothing.
    words = ["readelf", "--dynamic", "--dyn-syms", "--wide", str(built.path)]
    needs = toolchain.run_tool(words, "readelf")
    assert not re.search(r"NEEDED.*lib(cuda|cudart)", needs)
    assert not re.search(r"\bcuda[A-Z]\w+", needs)
    assert re.findall(r" GLOBAL +DEFAULT +\d+ (\w+)", needs) == ["PyInit__cuda_engine"]
    asked = []
    monkeypatch.setattr(_build, "ensure_engine", lambda recipe: asked.append(recipe.kind) or built)
    assert load.loaded_cuda_engine() is None
    module = load.cuda_engine()
    assert module is load.cuda_engine() is load.loaded_cuda_engine()
    assert asked == [_build.CUDA]
    assert load.loaded_engine() is None
    # Both functions return a CUDA status, with or without a GPU or driver.
    for error in (module.count_error(), module.launch_error()):
        assert re.fullmatch("cuda(Success|Error[A-Za-z]+)", error)


def test_cpu_and_cuda_keys_are_separate(cache, tiny_cuda):
    root = tiny_cuda.root()
    cpu = _build.Recipe(root)

    def edit(file):
        before = cpu.content(), tiny_cuda.content()
        (root / file).parent.mkdir(exist_ok=True)
        with open(root / file, "a", encoding="utf-8") as opened:
            opened.write("// edited\n")
        return cpu.content() != before[0], tiny_cuda.content() != before[1]

    assert edit("core/notes.md") == (False, False)
    for file in ("cuda/kernel.cu", "cuda/new.cuh", "cuda/new.h", "bindings/cuda_module.cpp"):
        assert edit(file) == (False, True), file
    for file in ("bindings/module.cpp", "cpu/ring.cpp"):
        assert edit(file) == (True, False), file
    for file in ("core/value.h", "bindings/tensor.h", "cpu/new.h", "cpu/strided.cpp"):
        assert edit(file) == (True, True), file


@needs_nvcc
@needs_compiler
def test_cache_key_covers_archs_and_nvcc(cache, tiny_cuda, monkeypatch, nvcc_in):
    def folder():
        plan = _compile.plan_build(tiny_cuda, tiny_cuda.content())
        return _build._key(plan).split("-")

    first = folder()
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "read_cpu", lambda: toolchain.Cpu("x86_64", "another", ("avx",)))
        assert folder() == first
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", "8.0")
    other_archs = folder()
    monkeypatch.setenv("PYRINGAR_NVCC", str(nvcc_in("other")))
    other_nvcc = folder()
    assert first[0] != other_archs[0] == other_nvcc[0]
    assert other_archs[1] != other_nvcc[1]


@pytest.mark.parametrize(
    ("built", "wanted", "used"),
    [
        ("8.0;9.0+PTX", "9.0", True),
        ("8.0;9.0+PTX", "", True),
        ("9.0", "9.0+PTX", False),
        ("9.0", "8.0", False),
    ],
)
def test_wheel_engine_must_have_wanted_archs(
    cache, tiny_cuda, no_nvcc, monkeypatch, caplog, built, wanted, used
):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", built)
    folder = tiny_cuda.root().parent / "_prebuilt" / "_cuda_engine"
    folder.mkdir(parents=True)
    record = {"content": tiny_cuda.content(), "archs": list(toolchain.cuda_archs_wanted())}
    (folder / "build.json").write_text(json.dumps(record))
    (folder / f"_cuda_engine{toolchain.extension_suffix()}").write_bytes(b"")
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", wanted)
    found = _build.find_engine(tiny_cuda)
    assert (found is not None and found.origin == "wheel") == used
    assert ("the CUDA engine in the wheel is not used" in caplog.text) == (not used)


# --- finding nvcc ---


def test_nvcc_is_searched_in_order(cache, tmp_path, monkeypatch, nvcc_in):
    wanted, home, on_path, system, pip = map(
        nvcc_in, ("wanted", "home/bin", "path", "system", "site/nvidia/cu13/bin")
    )
    monkeypatch.setenv("PYRINGAR_NVCC", str(wanted))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(toolchain, "_SYSTEM_NVCC", str(system))
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    for nvcc in (wanted, home, on_path, system, pip):
        found = toolchain.find_nvcc()
        assert found.command == (str(nvcc),)
        assert str(nvcc) in found.identity[0]
        nvcc.unlink()
        monkeypatch.delenv("PYRINGAR_NVCC", raising=False)


def test_missing_nvcc_error_names_package(cache, tiny_cuda, no_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/no/cuda")
    with pytest.raises(CompilerNotFoundError) as caught:
        _build.ensure_engine(tiny_cuda)
    for text in ("PYRINGAR_NVCC", "/no/cuda/bin/nvcc", "pip install 'pyringar[cuda]'"):
        assert text in str(caught.value)
    assert not cache.exists()
    monkeypatch.setenv("PYRINGAR_NVCC", "/no/such/nvcc")
    with pytest.raises(CompilerNotFoundError, match="PYRINGAR_NVCC='/no/such/nvcc'"):
        toolchain.find_nvcc()


@needs_compiler
def test_error_names_broken_toolkit(cache, tmp_path, monkeypatch, nvcc_in):
    nvcc = nvcc_in("broken")
    monkeypatch.setenv("PYRINGAR_NVCC", str(nvcc))
    for folder in ("include", "lib64"):
        (tmp_path / folder).mkdir()
    for output, file, text in [
        ("exit 1", "", "does not work"),
        ("echo hello", "", "does not say where its toolkit is"),
        (f"echo '#$ TOP={tmp_path}'", "include/cuda_runtime.h", "cuda_runtime.h is not"),
        (f"echo '#$ TOP={tmp_path}'", "lib64/libcudart_static.a", "libcudart_static.a is"),
        (f"echo '#$ TOP={tmp_path}'", "", "no GPU it makes code for"),
    ]:
        nvcc.write_text(f"#!/bin/sh\n{output}")
        with pytest.raises(BuildError, match=text) as caught:
            toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
        assert str(nvcc) in str(caught.value)
        assert "pyringar[cuda]" in str(caught.value)
        if file:
            (tmp_path / file).touch()


def test_nvcc_gets_plain_host_compiler():
    for command, flags in [("ccache /bin/sh", ("-ccbin", "/bin/sh")), ("ccache g++ -m64", ())]:
        assert toolchain.nvcc_host_flags(toolchain.Compiler(tuple(command.split()), ())) == flags


# --- architectures ---

TOOLKIT = toolchain.CudaToolkit(
    toolchain.Compiler(("nvcc",), ()), Path("/cuda"), (), Path(), "13.0.88", ("8.0", "9.0", "12.0")
)


@pytest.mark.parametrize(
    ("chosen", "wanted", "built"),
    [
        ("9.0+PTX;8.0", ("8.0", "9.0+PTX"), ("8.0", "9.0+PTX")),
        (" 12.0, 9.0 9.0", ("9.0", "12.0"), ("9.0", "12.0")),
        ("9.0;9.0+PTX", ("9.0+PTX",), ("9.0+PTX",)),
        ("all", ("all",), ("8.0", "9.0", "12.0+PTX")),
        ("", ("all",), ("8.0", "9.0", "12.0+PTX")),
    ],
)
def test_archs_variable_is_parsed(cache, monkeypatch, chosen, wanted, built):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", chosen)
    assert toolchain.cuda_archs_wanted() == wanted
    assert toolchain.cuda_archs_built(wanted, TOOLKIT) == built


@pytest.mark.parametrize("chosen", ["sm_90", "9", "9.0+ptx", "all;9.0"])
def test_malformed_archs_raise(cache, monkeypatch, chosen):
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", chosen)
    with pytest.raises(BuildError, match=re.escape(f"PYRINGAR_CUDA_ARCHS={chosen!r}")) as caught:
        toolchain.cuda_archs_wanted()
    assert "'8.0;9.0+PTX'" in str(caught.value)


def test_unknown_archs_raise():
    with pytest.raises(BuildError, match=r"13\.0\.88.* no code .*10\.3.* 8\.0, 9\.0, 12\.0\b"):
        toolchain.cuda_archs_built(("9.0", "10.3"), TOOLKIT)


def test_default_archs_match_gpus(cache, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: [(12, 0), (9, 0), (9, 0)][index]
    )
    assert toolchain.cuda_archs_wanted() == ("9.0", "12.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert toolchain.cuda_archs_wanted() == ("all",)
    monkeypatch.delitem(sys.modules, "torch")
    assert toolchain.cuda_archs_wanted() == ("all",), "torch must not be imported for this"


# --- the command line ---


@needs_compiler
def test_build_command_explains_missing_cuda(cache, tiny_cuda, no_nvcc, monkeypatch, capsys):
    own = tiny_cuda.source_root
    monkeypatch.setattr(_build.Recipe, "root", lambda self: self.source_root or own)

    def build(*arguments):
        return main(["build", *arguments]), "".join(capsys.readouterr())

    monkeypatch.setattr(torch.version, "cuda", None)
    status, text = build()
    assert (status, "cuda       not built: torch is a CPU build; --cuda c" in text) == (0, True)
    assert "cuda " not in build("--no-cuda")[1]
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert "cuda       not built: no GPU or no driver; --cuda compiles it" in build()[1]
    status, text = build("--cuda")
    assert (status, "pyringar build: no CUDA compiler" in text) == (1, True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    status, text = build()
    assert (status, "cuda       not built: no CUDA compiler" in text) == (0, True)
    monkeypatch.setenv("PYRINGAR_NVCC", "/no/such/nvcc")
    status, text = build()
    assert (status, "/no/such/nvcc" in text) == (1, True)


# --- nvcc from pip alone ---

FROM_PIP = (
    BUILD_ALONE
    + """
from pyringar.engine import toolchain
toolchain._SYSTEM_NVCC = "/nowhere"
built = build.ensure_engine(build.Recipe(Path(sys.argv[2]), kind=build.CUDA))
print(built.record["nvcc"], load.load(built).count_error())
"""
)


@pytest.mark.slow
@pytest.mark.thorough  # downloads a toolkit
@pytest.mark.timeout(900)
@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="pip has nvcc for Linux")
def test_nvcc_from_pip_builds_engine(tmp_path, cache, tiny_cuda, python):
    """The extra ``cuda`` installs nvcc, the headers and the runtime, so the build succeeds."""
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    wanted = re.search(r'^cuda = .*"(cuda-toolkit\[.+?)"', project, re.MULTILINE)
    assert wanted is not None
    # Install even if the parent environment has the package.
    run(python, "-m", "pip", "install", "--ignore-installed", wanted[1], cwd=tmp_path)

    variables = {"PATH": "/usr/bin:/bin", "CUDA_HOME": "", "PYRINGAR_CUDA_ARCHS": "9.0"}
    command = (python, "-c", FROM_PIP, REPO / "pyringar", str(tiny_cuda.source_root))
    text = run(*command, cwd=tmp_path, PYRINGAR_CACHE_DIR=cache, **variables)
    assert re.search(rf"toolkit {python.parents[1]}.*/nvidia/cu13\) cuda\w+$", text.strip())
