"""Bytes that a distribution and all it depends on take on disk, in whatever environment has it.

    python installed_size.py DISTRIBUTION[EXTRA] ...

Prints a JSON object of bytes by distribution, and which of them torch needs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse


def sizes(roots: list[str]) -> dict[str, int]:
    """Bytes of each distribution in the closure of `roots`, as far as it is installed."""
    requirements = _requirements()
    found: dict[str, int] = {}
    seen: set[tuple[str, str]] = set()
    pending = [requirements.Requirement(root) for root in roots]
    while pending:
        wanted = pending.pop()
        name = _normalised(wanted.name)
        extras = {"", *wanted.extras}
        try:
            distribution = importlib.metadata.distribution(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.setdefault(name, _bytes(distribution))
        for extra in extras:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in distribution.requires or []:
                needed = requirements.Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending.append(needed)
    return found


def _requirements() -> Any:
    try:
        return importlib.import_module("packaging.requirements")
    except ImportError:
        return importlib.import_module("pip._vendor.packaging.requirements")


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _bytes(distribution: importlib.metadata.Distribution) -> int:
    files = {Path(str(file.locate())) for file in distribution.files or []}
    # An editable installation lists none of its package's files.
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        checkout = Path(unquote(urlparse(origin["url"]).path))
        for module in (distribution.read_text("top_level.txt") or "").split():
            files.update(file for file in (checkout / module).rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    print(json.dumps({"sizes": sizes(sys.argv[1:]), "of_torch": sorted(sizes(["torch"]))}))
