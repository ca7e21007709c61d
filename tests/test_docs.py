"""The documentation holds together: what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_nothing_names_a_package_that_no_index_has() -> None:
    """Quire is installed from a clone: `pip install '.[otel]'`."""
    sources = [
        path
        for folder in ("quire", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    wrong = re.compile(r"pip install[^\n`]*quire-llm")
    found = [path for path in [*PAGES, *sources] if wrong.search(path.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_words_that_readers_stumble_over(page: Path) -> None:
    """Plain technical English, and about the product alone."""
    words = r"\b(besides|whoever|somebody|nobody|of whatever make|machines? (was|were) lent)\b"
    text = page.read_text(encoding="utf-8")
    assert not [found[0] for found in re.finditer(words, text, re.IGNORECASE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading that it has."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
