"""docs/models.md says what the registry has."""

from __future__ import annotations

from pathlib import Path

from quire.config.model import SUPPORTED_ARCHITECTURES
from quire.models.document import models_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_committed_page_is_up_to_date() -> None:
    """A family that is added, or changes, takes its documentation along."""
    page = models_page()
    assert all(f"`{name}`" in page for name in SUPPORTED_ARCHITECTURES)
    assert PAGE.read_text(encoding="utf-8") == page, (
        "run `python -m quire.models.document > docs/models.md`"
    )


def test_drafts_of_models_with_windows_only() -> None:
    """Most Mistrals have none; config.json of the first one leaves it to the family."""
    (row,) = (line for line in models_page().splitlines() if line.startswith("| Mistral |"))
    assert "| text; without windows also model, EAGLE-3 |" in row
