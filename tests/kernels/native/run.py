"""Compiles the native library together with the tests beside this file, and runs them.

    python tests/kernels/native/run.py address undefined
    python tests/kernels/native/run.py thread
    python tests/kernels/native/run.py --compiler aarch64-linux-gnu-g++ \
        --runner "qemu-aarch64 -L /usr/aarch64-linux-gnu"

The words are names of sanitizers that run together; without any, the library is compiled as it is
for use. Ends with status 1 if a test or a sanitizer finds something, or if there is no compiler
that has the sanitizers.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[2]
BUILD = runpy.run_path(str(ROOT / "setup.py"))
SOURCES: Path = ROOT / BUILD["SOURCES"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def untested_entry_points() -> set[str]:
    """Functions of the library that no test here calls."""
    exported: set[str] = set()
    for source in SOURCES.glob("*.cpp"):
        exported |= set(re.findall(r"^\w[\w ]*[ *](quire_\w+)\(", source.read_text(), re.MULTILINE))
    called = "\n".join(path.read_text() for path in TESTS.glob("*.cpp"))
    return {name for name in exported - {"quire_abi"} if f"{name}(" not in called}


def compile_all(compiler: list[str], sanitizers: list[str], objects: Path) -> Path:
    """The program."""
    machine = BUILD["run"]([*compiler, "-dumpmachine"])
    flags: dict[Path, list[str]] = {
        SOURCES / name: [*BUILD["COMPILE"], *own]
        for name, own in BUILD["flags_for"](machine).items()
    }
    common = ["-pthread"]
    if sanitizers:
        common += [*SANITIZED, "-fsanitize=" + ",".join(sanitizers)]
    for source in sorted(TESTS.glob("*.cpp")):
        flags[source] = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]

    def compile_one(source: Path) -> str:
        target = str(objects / f"{source.stem}.o")
        BUILD["run"]([*compiler, *flags[source], *common, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        files = list(pool.map(compile_one, flags))
    program = objects / "tests"
    BUILD["run"]([*compiler, *files, *common, "-o", str(program)])
    return program


def fixed_addresses() -> list[str]:
    """Words before a command that keep its addresses from being random.

    Some versions of the thread sanitizer refuse the addresses of newer kernels.
    """
    setarch = shutil.which("setarch")
    words = [setarch, "-R"] if setarch else []
    allowed = words and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    return words if allowed else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sanitizers", nargs="*", metavar="SANITIZER")
    parser.add_argument("--compiler", help="otherwise as when Quire is installed")
    parser.add_argument("--runner", default="", help="a command that runs the program")
    arguments = parser.parse_args()
    title = " and ".join(arguments.sanitizers) or "no"
    if untested := untested_entry_points():
        print(f"no test in {TESTS.name}/ calls {', '.join(sorted(untested))}")
        return 1
    runner = shlex.split(arguments.runner)
    if "thread" in arguments.sanitizers:
        runner = [*fixed_addresses(), *runner]
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiler = shlex.split(arguments.compiler or "") or BUILD["find_compiler"]()
            program = compile_all(compiler, arguments.sanitizers, Path(folder))
        except BUILD["BuildError"] as error:
            print(f"{title} sanitizer: cannot be built: {error}")
            return 1
        print(f"{title} sanitizer, {compiler[0]}:", flush=True)
        return subprocess.run([*runner, str(program)], env={**os.environ, **ENVIRONMENT}).returncode


if __name__ == "__main__":
    sys.exit(main())
