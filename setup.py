"""Builds the native CPU library; everything else about the package is in pyproject.toml.

The library is plain C++ with a C interface: it needs a compiler, but no headers of Python, numpy or
torch. Without a compiler the package is built without it and runs on its plain-torch reference.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("quire/kernels/cpu/src")
# The choice among the kernels is made at run time, so each file has flags of its own.
# Some files round exactly as their references in torch do, or alike in all their variants.
EXACT = "-ffp-contract=off"
PORTABLE = {
    "library.cpp": [],
    "thread_pool.cpp": [],
    "collectives.cpp": [],
    "attention.cpp": [],
    "linear_layer.cpp": [],
    "adapters.cpp": [],
    "largest.cpp": [],
    "sampling.cpp": [],
    "logprobs.cpp": [],
    "sampling_generic.cpp": [],
    "decoder.cpp": [],
    "experts.cpp": [],
    "routing.cpp": [],
    "bitmask.cpp": [],
    "kernel_generic.cpp": [EXACT],
    "pointwise_generic.cpp": [EXACT],
    "quantized.cpp": [EXACT],
    "linear_generic.cpp": [EXACT],
    "packing.cpp": [EXACT],
    "dequantize.cpp": [EXACT],
    "penalties.cpp": [EXACT],
    "ngrams.cpp": [],
}
X86_64 = {
    "kernel_avx2.cpp": ["-mavx2", "-mfma", "-mf16c", EXACT],
    "kernel_avx512.cpp": ["-mavx512f", EXACT],
    "pointwise_avx2.cpp": ["-mavx2", "-mfma", "-mf16c", EXACT],
    "pointwise_avx512.cpp": ["-mavx512f", EXACT],
    "sampling_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "sampling_avx512.cpp": ["-mavx512f"],
    "linear_avx2.cpp": ["-mavx2", "-mfma", "-mf16c", EXACT],
    "linear_vnni.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vnni", EXACT],
}
COMPILE = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
COMPILE += ["-ffp-contract=fast"]
# Not for the library's own tests: the thread sanitizer replaces functions of glibc by their names.
COMPILE_LIBRARY = [*COMPILE, "-include", str(SOURCES / "glibc_base.h")]
LINK = ["-shared", "-pthread"]
LINK += [] if sys.platform == "darwin" else ["-Wl,--as-needed"]


# The oldest glibc that a wheel's tag names, and what other libraries of that time have (PEP 599).
OLDEST_GLIBC = (2, 17)
OLDEST_RUNTIME = {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)}


class BuildError(Exception):
    """The library cannot be built here."""


def find_compiler() -> list[str]:
    """The command of a C++ compiler: CXX if it is set and there, else one of the usual names."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise BuildError("no C++ compiler was found (CXX, c++, g++, clang++)")


def run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{result.stderr}")
    return result.stdout


def flags_for(machine: str) -> dict[str, list[str]]:
    """Source files for what the compiler calls its machine, each with its own flags."""
    return {**PORTABLE, **X86_64} if machine.startswith("x86_64") else PORTABLE


def build_library(target: Path, objects: Path) -> None:
    """Compiles the sources into the shared library `target`."""
    compiler = find_compiler()
    flags = flags_for(run([*compiler, "-dumpmachine"]))
    objects.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)

    def compile_one(name: str) -> str:
        output = str((objects / name).with_suffix(".o"))
        run([*compiler, *COMPILE_LIBRARY, *flags[name], "-c", str(SOURCES / name), "-o", output])
        return output

    with ThreadPoolExecutor() as pool:
        files = list(pool.map(compile_one, flags))
    run([*compiler, *LINK, *files, "-o", str(target)])


class BuildLibrary(build_ext):
    """Builds the library with the compiler alone; a failure is a warning."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            build_library(target, Path(self.build_temp))
        except (BuildError, OSError) as error:
            target.unlink(missing_ok=True)
            self.warn(f"quire is built without its native CPU library: {error}")


def needed_versions(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each runtime library that `library` names, such as {"GLIBC": (2, 17)}.

    Versions are names in the file's table of strings, and all names count, used or not.
    """
    newest: dict[str, tuple[int, ...]] = {}
    pattern = rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)(?=\0)"
    for name, version in re.findall(pattern, library.read_bytes()):
        numbers = tuple(int(number) for number in version.split(b"."))
        newest[name.decode()] = max(newest.get(name.decode(), ()), numbers)
    return newest


def wheel_platform(platform: str, library: Path) -> str:
    """A wheel's tag for its platform: `linux_x86_64` is one that every machine with the glibc that
    the library needs accepts, unless the library needs more than that says."""
    if not platform.startswith("linux_") or not library.is_file():
        return platform
    needed = needed_versions(library)
    glibc = needed.pop("GLIBC", None)
    runtime_is_new = any(version > OLDEST_RUNTIME[name] for name, version in needed.items())
    if glibc is None or runtime_is_new:  # another C library, or a newer compiler's
        return platform
    major, minor = max(glibc[:2], OLDEST_GLIBC)
    return platform.replace("linux", f"manylinux_{major}_{minor}", 1)


class PlatformWheel(bdist_wheel):
    """The library depends on the platform but not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        build = self.get_finalized_command("build_ext")
        library = Path(build.get_ext_fullpath("quire.kernels.cpu.libquire_cpu"))
        return "py3", "none", wheel_platform(super().get_tag()[2], library)


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "quire.kernels.cpu.libquire_cpu",
                sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
                depends=sorted(str(path) for path in SOURCES.glob("*.h")),
                optional=True,
            )
        ],
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    )
