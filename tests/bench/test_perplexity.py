"""`benchmarks/perplexity.py`, and with it the quality of each precision of Quire."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from quire.config.model import load_model_config
from quire.text.tokenizer import load_tokenizer
from tests.test_embedded_model import read_with_gguf

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NUM_TOKENS, WINDOW = 2048, 512


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import perplexity

        return perplexity


@pytest.fixture(scope="module")
def windows(script: ModuleType, test_data: Path) -> list[list[int]]:
    found: list[list[int]] = script.read_windows(
        test_data / "text" / "wikitext2_valid.txt", NUM_TOKENS, WINDOW
    )
    return found


@pytest.fixture(scope="module")
def fp32(script: ModuleType, windows: list[list[int]]) -> float:
    return float(script.perplexity(script.quire_losses(windows, script.ENGINES["fp32"])))


def test_perplexity_of_equal_choices(script: ModuleType) -> None:
    """Guessing among n equal choices has perplexity n."""
    assert script.perplexity([math.log(50)] * 7) == pytest.approx(50)
    assert script.perplexity([math.log(2), math.log(8)]) == pytest.approx(4)


def test_windows_are_spread_over_the_text(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    text = " ".join(map(str, range(1000)))
    path.write_text(text)
    tokens = load_tokenizer(load_model_config(None).source).encode(text)
    middle = 100 * (len(tokens) // 200)
    assert middle >= 1000
    found = script.read_windows(path, 250, 100)
    assert found == [tokens[:100], tokens[middle : middle + 100]]
    with pytest.raises(SystemExit, match="the text has from 1 to"):
        script.read_windows(path, 10**6, 100)


def test_differences_and_aims(script: ModuleType) -> None:
    found = {"transformers": 20.0, "fp32": 20.01, "int8": 20.4102}
    assert script.difference(found, "transformers") is None
    assert script.difference(found, "fp32") == pytest.approx(0.0005)
    assert script.difference(found, "int8") == pytest.approx(0.02)
    assert script.difference({"int8": 20.0}, "int8") is None
    rows = script.table(found).splitlines()[2:]
    assert rows[1] == "| fp32 | 20.0100 | transformers | +0.050 % | 0.1 % |"
    assert rows[2] == "| int8 | 20.4102 | fp32 | +2.000 % | 1 % |"


@pytest.mark.slow
def test_fp32_is_transformers(script: ModuleType, windows: list[list[int]], fp32: float) -> None:
    """Within 0.1 % of transformers with weights that Quire's loader did not read."""
    reference = script.perplexity(script.transformers_losses(windows, read_with_gguf()))
    assert fp32 == pytest.approx(reference, rel=script.AIMS["fp32"].share)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "gguf", "gguf-a16"])
def test_reduced_precision_is_near_fp32(
    script: ModuleType, windows: list[list[int]], fp32: float, precision: str
) -> None:
    losses = script.quire_losses(windows, script.ENGINES[precision])
    assert script.perplexity(losses) == pytest.approx(fp32, rel=script.AIMS[precision].share)


@pytest.mark.slow
def test_the_whole_script(
    script: ModuleType, test_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = test_data / "text" / "wikitext2_valid.txt"
    words = ["--text", str(path), "--tokens", "128", "--window", "64", "--precisions", "fp32"]
    assert script.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.startswith("2 windows of 64 tokens of wikitext2_valid.txt")
    figures = json.loads((tmp_path / "out.json").read_text())
    assert list(figures["perplexity"]) == ["transformers", "fp32"]
