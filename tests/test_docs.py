"""The documentation holds together: what it points to is there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("quire", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
OTHER_SOURCES = [
    ROOT / "Makefile",
    *(
        path
        for folder in ("quire", "tests")
        for kind in ("cpp", "h", "js", "html", "json")
        for path in sorted((ROOT / folder).rglob(f"*.{kind}"))
    ),
]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_nothing_names_a_package_that_no_index_has() -> None:
    """Quire is installed from a clone: `pip install '.[otel]'`."""
    wrong = re.compile(r"pip install[^\n`]*quire-llm")
    found = [path for path in [*PAGES, *SOURCES] if wrong.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_words_that_readers_stumble_over() -> None:
    """Plain technical English, and about the product alone, in pages, sources and names."""
    words = (
        r"(?<![a-z])(besides|whoever|somebody|nobody|of whatever make|machines? (was|were) lent)"
    )
    found = [
        (str(path.relative_to(ROOT)), word[0])
        for path in [*PAGES, *SOURCES, *OTHER_SOURCES]
        if path != Path(__file__).resolve()
        for word in re.finditer(words, path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert not found


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


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    """Paths begin at the repository or at `quire/`; a bare name is one of a folder named nearby."""
    text = (ROOT / page).read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "quire").rglob("*") if path.is_file()}
    named = set(re.findall(r"[\w./-]*\w\.(?:py|h|cpp|json)\b", text))
    missing = {
        name
        for name in named
        if not ((ROOT / name).exists() or (ROOT / "quire" / name).exists())
        and ("/" in name or name not in names)
    }
    assert named and not missing


def num_code_lines(path: Path) -> int:
    """Lines with code in them: no blanks, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@pytest.mark.parametrize("begins", ["the core: ", "all of `quire/`"])
def test_sizes_that_the_architecture_page_states(begins: str) -> None:
    """A claim about size is true within a twentieth."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {begins}")]
    _, what, num_lines, num_code, _ = line.split("|")
    packages = re.findall(r"`(\w+)/`", what)
    folders = [ROOT / ("" if name == "quire" else "quire") / name for name in packages]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    stated = [int(text.replace(",", "")) for text in (num_lines, num_code)]
    actual = [
        sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        sum(map(num_code_lines, files)),
    ]
    assert stated == pytest.approx(actual, rel=0.05)


def test_sizes_of_files_that_the_architecture_page_states() -> None:
    """Each row of the weekend's lists says how much there is to read."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*\.py`) \| ([\d,]+) \|", page, re.MULTILINE)
    stated = [int(count.replace(",", "")) for _, count in rows]
    actual = [
        sum(
            len((ROOT / "quire" / name).read_text(encoding="utf-8").splitlines())
            for name in re.findall(r"`([^`]+)`", names)
        )
        for names, _ in rows
    ]
    assert len(rows) > 10
    assert stated == pytest.approx(actual, rel=0.05)


@pytest.mark.parametrize("day", ["Saturday", "Sunday"])
def test_lines_to_read_on_a_day_are_the_sum_of_its_rows(day: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(rf"^\*\*{day}: [^\n]*\(([\d,]+) lines(.*?)^[*W]", page, re.M | re.S)
    assert found is not None
    rows = re.findall(r"^\| `[^|]*\.py` \| ([\d,]+) \|", found[2], re.MULTILINE)
    assert len(rows) > 5
    total, *parts = [int(count.replace(",", "")) for count in (found[1], *rows)]
    assert total == pytest.approx(sum(parts), rel=0.05)


def test_the_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (folders,) = [
        block
        for block in re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if re.match(r" *server/ ", block)
    ]
    packages = {path.parent.name for path in (ROOT / "quire").glob("*/__init__.py")}
    assert packages - set(re.findall(r"(\w+)/", folders)) <= {"entrypoints"}
