"""The native library is built with a compiler alone, is optional, and has threads of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quire import SamplingParams, __version__
from quire.kernels.cpu import library
from tests.tiny import save_tiny, tiny_llm

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path("quire/kernels/cpu/src")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the build needs: setup.py and the sources, and nothing else."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / SOURCES, tmp_path / SOURCES)
    return tmp_path


def build(tree: Path, **environment: str) -> tuple[str, Path]:
    """Builds the library; returns what the build said and where the library would be."""
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", "out", "--build-temp", "objects"],
        cwd=tree,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    return result.stdout, tree / "out" / "quire/kernels/cpu/libquire_cpu.so"


def test_builds_without_a_compiler(tree: Path) -> None:
    """Installing must not fail where there is none; it says what is missing."""
    said, built = build(tree, PATH=str(tree), CXX="/nowhere/c++")
    assert "without its native CPU library" in said and "no C++ compiler" in said
    assert not built.exists()


def test_broken_sources_do_not_stop_the_installation(tree: Path, native: None) -> None:
    for source in (tree / SOURCES).glob("*.cpp"):
        source.write_text("this is not C++")
    said, built = build(tree)
    assert "without its native CPU library" in said and "this is not C++" in said
    assert not built.exists()


def check_objects(folder: Path) -> None:
    """Whatever runs before an instruction set is chosen, or without it, runs on any x86-64."""
    flags = runpy.run_path(str(ROOT / "setup.py"))
    for name in flags["PORTABLE"]:
        code = output("objdump", "-d", "--no-show-raw-insn", folder / name.replace(".cpp", ".o"))
        wide = re.search(r"%[yz]mm|\tv(mov|add|mul|p|z|cvt|f)\w*", code)
        assert wide is None, f"{name} has {wide and wide[0]}"
    for name in flags["X86_64"]:
        # The linker keeps one copy of a weak function, which might be the one for AVX-512.
        symbols = output("nm", "--defined-only", "-C", folder / name.replace(".cpp", ".o"))
        shared = [line for line in symbols.splitlines() if line.split()[1] in "WVu"]
        assert not shared, f"{name} shares {shared[0]}"


def check_wheel_tag(built: Path) -> None:
    """A wheel's tag promises no older glibc than the library's functions need, and the library
    runs wherever torch's own wheels (glibc 2.28) do."""
    found = re.findall(r"\(GLIBC_2\.(\d+)[.\d]*\)", output("objdump", "-T", built))
    needed = max(int(minor) for minor in found)
    assert needed <= 28, f"something needs glibc 2.{needed}: see src/glibc_base.h"
    tag = runpy.run_path(str(ROOT / "setup.py"))["wheel_platform"]("linux_x86_64", built)
    promised = re.fullmatch(r"manylinux_2_(\d+)_x86_64", tag)
    assert promised is not None and int(promised[1]) >= needed


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        ("GLIBC_2.2.5 GLIBC_2.34 GLIBC_2.14 CXXABI_1.3", "manylinux_2_34_x86_64"),
        ("GLIBC_2.2.5", "manylinux_2_17_x86_64"),
        ("GLIBC_2.17 GLIBCXX_3.4.30", "linux_x86_64"),  # a newer libstdc++ than glibc says
        ("CXXABI_1.3", "linux_x86_64"),  # musl
    ],
)
def test_wheel_tag_follows_the_names_in_the_library(names: str, tag: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools.command.bdist_wheel")
    made = tmp_path / "made.so"
    made.write_bytes(b"ELF\0" + b"\0".join(name.encode() for name in names.split()) + b"\0")
    wheel_platform = runpy.run_path(str(ROOT / "setup.py"))["wheel_platform"]
    assert wheel_platform("linux_x86_64", made) == tag
    assert wheel_platform("linux_x86_64", tmp_path / "none.so") == "linux_x86_64"


@pytest.mark.slow
def test_wheel_has_the_tag_and_serves(tmp_path: Path, native: None) -> None:
    """What `make wheel` makes holds the library, which is built without torch, as in an isolated
    build, and asks for what serving needs."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "quire", tree / "quire", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    barred = tmp_path / "barred"
    barred.mkdir()
    (barred / "torch.py").write_text("raise ImportError")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--wheel-dir", str(tmp_path), str(tree)],
        env={**os.environ, "PYTHONPATH": str(barred)},
        check=True,
        timeout=280,
    )
    (wheel,) = tmp_path.glob("*.whl")
    machine = platform.machine()
    assert re.fullmatch(rf"quire_llm-[\d.]+-py3-none-manylinux_2_\d+_{machine}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("quire/kernels/cpu/libquire_cpu.so", tmp_path)
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        about = archive.read(metadata).decode()
    built = tmp_path / "quire/kernels/cpu/libquire_cpu.so"
    loaded, description = library.load(built)
    assert loaded is not None and description.startswith("native library")
    if platform.machine() == "x86_64" and shutil.which("objdump") and shutil.which("nm"):
        check_objects(next((tree / "build").rglob("library.o")).parent)
        check_wheel_tag(built)
    plain = [line for line in about.splitlines() if "extra ==" not in line]
    for package in ("fastapi", "uvicorn", "httptools", "pydantic", "pyzmq", "prometheus_client"):
        assert any(line.startswith(f"Requires-Dist: {package}") for line in plain)
    assert "Provides-Extra: server" in plain
    assert any(line.startswith("Project-URL: Repository, https://") for line in plain)


def test_a_clone_takes_the_library_of_an_installation(tmp_path: Path, native: None) -> None:
    """`pip install .` builds it in the installed copy; Python started in the clone imports the
    clone's package, which has none."""
    clone, site = tmp_path / "clone", tmp_path / "site"
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "quire", clone / "quire", ignore=unbuilt)
    about = site / f"quire_llm-{__version__}.dist-info/METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: quire-llm\nVersion: {__version__}\n")
    installed = site / "quire/kernels/cpu/libquire_cpu.so"
    installed.parent.mkdir(parents=True)
    shutil.copy(library.LIBRARY, installed)
    code = "import quire; from quire.kernels.cpu import library; print(library.LIBRARY)"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; print(library.available()[0], quire.__file__)"],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    found, _, source = result.stdout.partition("\n")
    assert Path(found) == installed
    assert source.strip() == f"True {clone / 'quire/__init__.py'}"


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_library_needs_no_openmp(native: None) -> None:
    """A runtime of another name than torch's would be loaded beside it."""
    content = library.LIBRARY.read_bytes()
    assert not any(name in content for name in (b"libgomp", b"libomp", b"libiomp"))


FORKED = """
import os, sys
import torch
from quire.kernels.cpu.sampling import largest

torch.set_num_threads(4)
logits = torch.randn(64, 20_000)
expected = logits.argmax(-1).tolist()
assert largest(logits).tolist() == expected
for _ in range(20):
    if (child := os.fork()) == 0:
        os._exit(0 if largest(logits).tolist() == expected == largest(logits).tolist() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert largest(logits).tolist() == expected
"""


def test_a_forked_child_computes_too(native: None) -> None:
    """Its parent's threads are not there, and it must not wait for them."""
    subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, timeout=60, check=True)


def test_missing_and_foreign_libraries_are_named(tmp_path: Path) -> None:
    found, reason = library.load(tmp_path / "nothing.so")
    assert found is None and "not built" in reason
    foreign = tmp_path / "foreign.so"
    foreign.write_text("not a library")
    found, reason = library.load(foreign)
    assert found is None and "cannot be loaded" in reason


WITHOUT_LIBRARY = """
import json, sys
from quire import LLM, SamplingParams
from quire.kernels import cpu
assert not cpu.available()[0]
wanted = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
for quantization in (None, "int8"):
    llm = LLM(sys.argv[1], quantization=quantization, num_threads=1, kv_cache_memory_bytes="32MiB")
    outputs = llm.generate(json.loads(sys.argv[2]), wanted, use_tqdm=False)
    print(json.dumps([output.outputs[0].text for output in outputs]))
"""


def test_generates_the_same_text_without_the_library(tmp_path: Path, native: None) -> None:
    """The package as it is installed where there was no compiler: references do all the work, and a
    line says what is lost."""
    model, prompts = tmp_path / "model", ["the quick brown", "a", "def f(x):"]
    save_tiny(model, intermediate_size=72)  # no whole blocks: one layer stays in float32 with int8
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "quire", tmp_path / "quire", ignore=unbuilt)
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY, str(model), json.dumps(prompts)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for lost in ("not built", "attention", "linear layers", "quantised weights"):
        assert lost in result.stderr
    wanted = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for quantization, line in zip((None, "int8"), result.stdout.splitlines(), strict=True):
        with tiny_llm(model, quantization=quantization) as llm:
            outputs = llm.generate(prompts, wanted, use_tqdm=False)
        assert json.loads(line) == [output.outputs[0].text for output in outputs]


def test_unknown_instruction_set_is_refused(native: None) -> None:
    with pytest.raises(ValueError, match="this processor has generic"):
        library.set_isa("mmx")
