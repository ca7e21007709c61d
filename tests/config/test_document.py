"""docs/options.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from quire.config.arguments import IGNORED, REFUSED
from quire.config.document import options_page
from quire.config.options import option_groups

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_the_committed_page_is_up_to_date() -> None:
    """An option that changes takes its documentation along."""
    assert PAGE.read_text(encoding="utf-8") == options_page(), (
        "run `python -m quire.config.document > docs/options.md`"
    )


def test_every_argument_is_in_its_class() -> None:
    """Supported, warned of or refused: a user finds each name once, under the right heading."""
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
    for title, names in (
        ("Supported", option_groups()),
        ("Accepted with a warning", IGNORED),
        ("Refused", REFUSED),
    ):
        missing = [name for name in names if f"`{name}`" not in sections[title]]
        assert not missing, (title, missing)
