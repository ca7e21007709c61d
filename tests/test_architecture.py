"""Keeps the shape of the code: who imports whom, what stays free of torch, who owns which state.

Each rule is checked on the syntax trees of all files, so imports inside functions count too.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from quire.config.model import SUPPORTED_ARCHITECTURES
from quire.config.options import option_groups
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "quire"

COMMON = {"protocol", "config", "metrics"}
BELOW = {
    "protocol": set(),
    "files": {"protocol"},
    "config": {"protocol", "files"},
    "metrics": {"protocol", "config"},
    "scheduler": COMMON,
    "kernels": COMMON | {"files"},
    "layers": COMMON | {"kernels"},
    "decoding": COMMON | {"kernels"},
    "loading": COMMON | {"files", "layers", "kernels"},
    "models": COMMON | {"files", "loading", "layers", "kernels"},
    "worker": COMMON | {"files", "models", "loading", "layers", "decoding", "kernels"},
    "engine.executors": COMMON | {"worker"},
    "engine": COMMON | {"files", "engine.executors", "scheduler"},
    "text": COMMON | {"files"},
    "frontend": COMMON | {"files", "text", "engine"},
    "server": COMMON | {"frontend", "text"},
    "client": COMMON,
    "bench": COMMON
    | {"client", "frontend", "text", "engine.executors", "loading", "models", "quire"},
    "quantize": COMMON | {"files", "text", "worker", "models", "loading", "layers", "kernels"},
    "lora": COMMON | {"files", "models", "loading", "quantize"},
    "entrypoints": {"server", "config", "quire"},
    "quire": COMMON
    | {"frontend", "server", "client", "bench", "quantize", "lora", "engine.executors"},
}
"""What each package may import in addition to itself; "quire" stands for the files in the root."""

TORCH_FREE = ("protocol", "files", "config", "metrics", "scheduler")
TORCH_AT_TOP_LEVEL = (
    "worker",
    "models",
    "loading",
    "layers",
    "kernels",
    "decoding",
    "quantize",
    "lora",
    "engine.executors",
)
HEAVY = ("torch", "triton", "transformers")
TRANSFORMERS_IN_FUNCTIONS = ("text", "bench")


@dataclasses.dataclass(frozen=True)
class Import:
    module: str
    line: int
    in_function: bool
    for_types: bool
    """Under `if TYPE_CHECKING`, and so never executed."""


def source_files(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(module: str) -> str:
    """The key of BELOW for a dotted module name."""
    parts = module.split(".")[1:]
    if parts[:2] == ["engine", "executors"]:
        return "engine.executors"
    return parts[0] if parts and parts[0] in BELOW else "quire"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    def walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, in_function, for_types)
            elif isinstance(child, ast.ImportFrom):
                for name in imported_names(child):
                    yield Import(name, child.lineno, in_function, for_types)
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            typing = for_types or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            )
            yield from walk(child, inside, typing)

    def imported_names(node: ast.ImportFrom) -> list[str]:
        base = node.module or ""
        if node.level:
            parts = path.relative_to(ROOT).parts[: -node.level]
            base = ".".join((*parts, *filter(None, [node.module])))
        return [f"{base}.{alias.name}" for alias in node.names]

    yield from walk(tree_of(path), False, False)


def is_from(found: Import, packages: tuple[str, ...]) -> bool:
    return found.module.split(".")[0] in packages


def reachable_packages(start: str) -> set[str]:
    """Packages that `start` imports, directly or through others."""
    reached, queue = set(), [start]
    while queue:
        package = queue.pop()
        if package in reached:
            continue
        reached.add(package)
        queue += [
            package_of(found.module)
            for path in source_files()
            if package_of(module_of(path)) == package
            for found in imports_of(path)
            if is_from(found, ("quire",)) and package_of(found.module) != "quire"
        ]
    return reached


def test_imports_point_down() -> None:
    """A lower package that knew a higher one could not be used, tested or replaced without it."""
    wrong = []
    for path in source_files():
        own = package_of(module_of(path))
        for found in imports_of(path):
            if not is_from(found, ("quire",)):
                continue
            other = package_of(found.module)
            if other != own and other not in BELOW[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{found.line} imports {found.module}")
    assert not wrong, "\n".join(wrong)


def test_no_package_is_below_itself() -> None:
    """In a cycle of packages none is the lower one. Benchmarks use the public names of the root,
    which has their command."""
    TopologicalSorter({**BELOW, "bench": BELOW["bench"] - {"quire"}}).prepare()


def test_scheduler_and_worker_never_meet() -> None:
    """They share StepPlan and StepResult only, and so the scheduler runs without a GPU."""
    assert "worker" not in reachable_packages("scheduler")
    assert "scheduler" not in reachable_packages("worker")


def test_no_torch_in_host_packages() -> None:
    """The scheduler and its neighbours run, and are tested, without torch."""
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.module}"
        for path in source_files()
        if package_of(module_of(path)) in TORCH_FREE or "structured_output" in path.parts
        for found in imports_of(path)
        if is_from(found, HEAVY)
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_and_transformers_are_imported_where_they_may_be() -> None:
    """Elsewhere torch waits until a function needs it, and transformers is a fallback only."""
    wrong = []
    for path in source_files():
        own = package_of(module_of(path))
        for found in imports_of(path):
            deferred = found.in_function or found.for_types
            torch_ok = own in TORCH_AT_TOP_LEVEL or deferred
            transformers_ok = own in TRANSFORMERS_IN_FUNCTIONS and deferred
            if (is_from(found, ("torch", "triton")) and not torch_ok) or (
                is_from(found, ("transformers",)) and not transformers_ok
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{found.line} imports {found.module}")
    assert not wrong, "\n".join(wrong)


def test_only_config_reads_arguments_and_environment() -> None:
    """Options come from one place; a value read elsewhere would escape checks, help and notes."""
    names = {"os.environ", "os.environb", "os.getenv", "sys.argv"}
    wrong = []
    for path in source_files():
        if package_of(module_of(path)) == "config":
            continue
        where = path.relative_to(ROOT)
        wrong += [
            f"{where}:{found.line} imports {found.module}"
            for found in imports_of(path)
            if (is_from(found, ("argparse",)) and not found.for_types) or found.module in names
        ]
        wrong += [
            f"{where}:{node.lineno} uses {ast.unparse(node)}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in names
        ]
    assert not wrong, "\n".join(wrong)


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in sys.modules after a statement ran in a fresh interpreter."""
    program = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\n"
    program += "print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import quire; quire.SamplingParams; quire.QuireError; quire.EngineOptions",
        "from quire.cli import main; main(['--help'])",
        "from quire.cli import main; main(['generate', '--help'])",
        "from quire.cli import main; main(['bench', '--help'])",
        "from quire.cli import main; main(['quantize', '--help'])",
        "from quire.cli import main; main(['quality', '--help'])",
        "from quire.cli import main; main(['generate', 'x', '--block-size', '3'])",
    ],
)
def test_import_and_help_do_not_load_torch(statement: str) -> None:
    """Importing torch takes seconds; `import quire`, help and wrong options must answer at once."""
    assert not loaded_after(statement) & {*HEAVY, "huggingface_hub", "tokenizers"}


def test_host_packages_do_not_load_torch_indirectly() -> None:
    """Catches what syntax trees cannot see: a third package that imports torch."""
    modules = [
        module_of(path) for path in source_files() if package_of(module_of(path)) in TORCH_FREE
    ]
    assert not loaded_after("import " + ", ".join(modules)) & set(HEAVY)


SERVERS_PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "pydantic", "zmq")
NOT_FOR_THE_ENGINE = (
    *SERVERS_PACKAGES,
    "prometheus_client",
    "huggingface_hub",
    "llguidance",
    "tqdm",
)
WITHOUT_THEM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2].split(), None))  # importing them fails
from quire import LLM, SamplingParams
with LLM(sys.argv[1], num_threads=1, kv_cache_memory_bytes="32MiB") as llm:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate(["a prompt"], params)
    assert len(output.outputs[0].token_ids) == 4
    assert llm.get_metrics()
assert "torch._dynamo" not in sys.modules, "torch's compiler takes half a second to import"
"""


def test_engine_runs_without_the_servers_packages(tmp_path: Path) -> None:
    """A GPU host runs the engine and the offline API with torch, triton, safetensors, tokenizers,
    numpy and msgspec alone."""
    save_tiny(tmp_path)
    words = [sys.executable, "-c", WITHOUT_THEM, str(tmp_path), " ".join(NOT_FOR_THE_ENGINE)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_names() -> None:
    """A file or class named after no idea collects whatever has no home."""
    files = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    wrong = [str(p.relative_to(ROOT)) for p in source_files(PACKAGE) if p.name in files]
    wrong += [
        f"{path.relative_to(ROOT)}:{node.lineno} class {node.name}"
        for path in source_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and re.search(r"^_?Base[A-Z]|(Impl|Mixin)$", node.name)
    ]
    assert not wrong, "\n".join(wrong)


WHOLE_OBJECTS = {"Scheduler", "EngineCore", "Engine", "Worker", "ModelRunner", "LLM", "AsyncLLM"}
WHOLE_NAMES = ("_core", "core", "runner")
"""Attributes that hold one of them, whatever they are attributes of."""


def names_in(annotation: ast.expr | None) -> set[str]:
    """Class names in an annotation, also where it is a text."""
    found: set[str] = set()
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w+", node.value))
        elif isinstance(node, (ast.Name, ast.Attribute)):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_packages_do_not_import_themselves_for_types() -> None:
    """A file that needs its neighbour's types only is part of that neighbour, cut off."""
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.module}"
        for path in source_files()
        for found in imports_of(path)
        if found.for_types
        and is_from(found, ("quire",))
        and package_of(found.module) == package_of(module_of(path)) != "quire"
    ]
    assert not wrong, "\n".join(wrong)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(node: ast.AST) -> list[Function]:
    return [one for one in ast.walk(node) if isinstance(one, Function)]


def whole_arguments(function: Function, own: set[str]) -> set[str]:
    """Arguments that are one of the large objects, those of the class itself aside."""
    arguments = function.args
    return {
        one.arg
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if names_in(one.annotation) & (WHOLE_OBJECTS - own)
    }


def assignments_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each, also of `a, b = c, d`."""
    for one in ast.walk(node):
        if isinstance(one, (ast.AnnAssign, ast.NamedExpr)) and one.value is not None:
            yield one.target, one.value
        elif isinstance(one, ast.Assign):
            for target in one.targets:
                if isinstance(target, ast.Tuple) and isinstance(one.value, ast.Tuple):
                    yield from zip(target.elts, one.value.elts, strict=False)
                else:
                    yield target, one.value


def reaches_in_class(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Where a class that keeps one of the large objects does more than call it and read its
    values: takes its parts apart, changes it, or uses what is private. A local name counts as
    what it was assigned."""
    kept = set()
    for function in functions_in(node):
        taken = whole_arguments(function, {node.name})
        kept |= {
            ast.unparse(target)
            for target, value in assignments_in(function)
            if ast.unparse(target).startswith("self.") and ast.unparse(value) in taken
        }
    # What makes such an object also sets it up, as `Worker` does with `ModelRunner`.
    called = {ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
    names = () if called & WHOLE_OBJECTS else WHOLE_NAMES
    for function in functions_in(node):
        yield from reaches_in_function(function, kept, names)


def reaches_in_function(
    function: Function, kept: Collection[str] = (), names: tuple[str, ...] = WHOLE_NAMES
) -> Iterator[tuple[int, str]]:
    """The same in a function: `kept` are expressions for large objects, `names` attributes."""

    def is_kept(node: ast.expr) -> bool:
        named = isinstance(node, ast.Attribute) and node.attr in names
        return named or ast.unparse(node) in kept

    whole, parts = set[str](), set[str]()
    for target, value in assignments_in(function):
        if isinstance(target, ast.Name) and is_kept(value):
            whole.add(target.id)

    def is_whole(node: ast.expr) -> bool:
        return is_kept(node) or (isinstance(node, ast.Name) and node.id in whole)

    for target, value in assignments_in(function):
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
            parts |= {target.id} if is_whole(value.value) else set()
    for one in ast.walk(function):
        if not isinstance(one, ast.Attribute):
            continue
        of, of_whole = one.value, is_whole(one.value)
        is_deep = isinstance(of, ast.Attribute) and is_whole(of.value)
        is_deep |= isinstance(of, ast.Name) and of.id in parts
        is_changed = of_whole and not isinstance(one.ctx, ast.Load)
        if is_deep or is_changed or (of_whole and one.attr.startswith("_")):
            yield one.lineno, ast.unparse(one)


def test_no_function_reaches_into_a_whole_object() -> None:
    """What reads or changes the state of one of the large objects is a method of it."""
    wrong = []
    for path in source_files():
        if package_of(module_of(path)) in ("bench", "quire"):
            continue  # users of the public API
        for top in tree_of(path).body:
            found: Iterable[tuple[int, str]] = ()
            if isinstance(top, ast.ClassDef):
                found = reaches_in_class(top)
            elif isinstance(top, Function):
                found = reaches_in_function(top)
            wrong += [f"{path.relative_to(ROOT)}:{line} {text}" for line, text in found]
            own = {top.name} if isinstance(top, ast.ClassDef) else set()
            for node in functions_in(top):
                taken = whole_arguments(node, own)
                reaches = any(
                    isinstance(one, ast.Attribute)
                    and isinstance(one.value, ast.Name)
                    and one.value.id in taken
                    for one in ast.walk(node)
                )
                if reaches:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("statement", "is_reach"),
    [
        ("self._scheduler.columns.synchronous[rows] = flags", True),
        ("self._scheduler.kv.reset()", True),
        ("self._scheduler.pause = True", True),
        ("self._scheduler.num_steps += 1", True),
        ("self._scheduler._release(row)", True),
        ("scheduler = self._scheduler; return scheduler.kv.pool", True),
        ("columns = self._scheduler.columns; return columns.epoch", True),
        ("rows, c = 1, self._scheduler.columns; return c.epoch", True),
        ("self._scheduler.end(sequence)", False),
        ("return self._scheduler.load().num_waiting", False),
        ("metrics = self._scheduler.metrics; read(metrics)", False),
        ("self._other.columns.synchronous = flags", False),
        ("weakref.finalize(self, self._core.executor.shutdown)", True),
        ("engine = start_engine(options); engine.core.grammars.compiler.set_vocabulary(v)", True),
        ("core = engine.core; core.monitor.status = StatusLog()", True),
        ("monitor, s = engine.core.monitor, engine.core.scheduler; monitor.status = s", True),
        ("return self._worker.runner.table.token_ids", True),
        ("self._other.runner.drafter = None", True),
        ("engine.core.watch(logs_status=True); core = engine.core; core.shutdown()", False),
        ("with self._other.core.host_time: return self._other.core.death", False),
    ],
)
def test_a_reach_through_a_kept_object_is_seen(statement: str, is_reach: bool) -> None:
    source = f"""
class Part:
    def __init__(self, scheduler: Scheduler, other: Other) -> None:
        self._scheduler = scheduler
        self._other = other

    def method(self):
        {statement}
"""
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert bool(list(reaches_in_class(node))) == is_reach


def test_options_and_environment_stay_few() -> None:
    """Each option multiplies what must be tested; environment variables are for debugging only."""
    assert len(option_groups()) <= 60
    variables = {
        node.value
        for path in source_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"QUIRE_[A-Z_]+", node.value)
    }
    assert len(variables) <= 5, sorted(variables)


def test_models_know_no_backend() -> None:
    """Fusion and backends are applied to a loaded model, and so none of them changes its file."""
    architectures = set(SUPPORTED_ARCHITECTURES.values())
    allowed = {"layer"}
    wrong = []
    for path in sorted((PACKAGE / "models").glob("*.py")):
        if path.stem not in architectures:
            continue
        for found in imports_of(path):
            parts = found.module.split(".")
            is_backend = parts[:3] == ["quire", "layers", "attention"] and parts[3] not in allowed
            if is_backend or parts[:2] == ["quire", "kernels"]:
                wrong.append(f"{path.relative_to(ROOT)}:{found.line} imports {found.module}")
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno} asks which class something has"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        ]
    assert not wrong, "\n".join(wrong)
