"""`rank_pattern` and `alpha_pattern` of adapters: which entry is that of a module, as peft decides.

They are regular expressions of strangers, some of which take Python hours. Plain names are matched
here; with any other the whole table is matched in a process that can be ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping

from quire.protocol.errors import AdapterError

MAX_PATTERNS = 1 << 14
TIMEOUT_S = 10.0
_PLAIN = re.compile(r"[\w.\-]+", re.ASCII)
_PROGRAM = """
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
except (ImportError, OSError, ValueError):
    pass
patterns, paths = json.load(sys.stdin)
for pattern in patterns:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        sys.exit(json.dumps([pattern, str(error)]))
compiled = [re.compile(r"(.*\\.)?(" + pattern + ")$") for pattern in patterns]
found = [next((i for i, one in enumerate(compiled) if one.match(path)), -1) for path in paths]
print(json.dumps(found))
"""


def match_patterns(patterns: Mapping[str, float], paths: Iterable[str]) -> dict[str, float]:
    """The value of each path that a pattern matches: the first one that is the end of the path from
    a dot on."""
    every = sorted(set(paths))
    if not patterns:
        return {}
    if len(patterns) > MAX_PATTERNS:
        raise AdapterError(
            f"it has {len(patterns)} entries, more than {MAX_PATTERNS}; join them as regular "
            "expressions"
        )
    values = list(patterns.values())
    if all(map(_PLAIN.fullmatch, patterns)):
        found = _match_plain(list(patterns), every)
    else:
        found = _match_apart(list(patterns), every)
    return {path: values[i] for path, i in zip(every, found, strict=True) if i >= 0}


def _match_plain(patterns: list[str], paths: list[str]) -> list[int]:
    """A dot stands for any one character in them, and there is nothing else to try."""
    compiled = [
        (pattern.rpartition(".")[2], re.compile(rf"(.*\.)?({pattern})$")) for pattern in patterns
    ]
    return [
        next(
            (i for i, (end, one) in enumerate(compiled) if path.endswith(end) and one.match(path)),
            -1,
        )
        for path in paths
    ]


def _match_apart(patterns: list[str], paths: list[str]) -> list[int]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-W", "ignore", "-c", _PROGRAM],
            input=json.dumps([patterns, paths]),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        found: list[int] = json.loads(done.stdout)
        return found
    if done is not None and done.stderr.startswith("["):
        pattern, problem = json.loads(done.stderr)
        raise AdapterError(f"{pattern[:200]!r} is no regular expression ({problem})")
    raise AdapterError(
        f"its regular expressions took more than {TIMEOUT_S:.0f} s or a gigabyte to match with the "
        "names of modules; write names without repetitions"
    )
