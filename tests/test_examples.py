"""Every example runs as its reader would run it, on the embedded model, and shows what it promises.

A new file in examples/ fails here until it has a check.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.config.embedded import find_embedded_model
from tests.server.running import RunningServer

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(script: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        # One thread: waiting for each other at every operator, two are slow on busy cores.
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def check_quickstart(shown: str) -> None:
    assert re.search(r"^'The future of AI is' -> ['\"].*\w+.*['\"]$", shown, re.MULTILINE)
    assert re.search(r"^'The capital of France is' -> ['\"].*Paris.*['\"]$", shown, re.MULTILINE)


def check_adapters(shown: str) -> None:
    assert re.search("^no adapter: '.*Paris", shown, re.MULTILINE)
    texts = re.findall("^(?:no adapter|gentle|strong): (.+)$", shown, re.MULTILINE)
    assert len(set(texts)) == 3
    assert "loaded: [1, 2]" in shown


def check_demo(shown: str) -> None:
    assert shown.count("\n> ") == 5
    for figure in ("tokens/s", "KV blocks used", "KV memory wasted", "prefix-cache hit rate"):
        assert re.search(rf"{figure}.*\d|\d.*{figure}", shown), figure


def check_chat(shown: str) -> None:
    assert re.search("first answer: .*Tokyo", shown)
    assert re.search("second answer: .*Berlin", shown)
    cached, total = map(int, re.findall(r"(\d+) of (\d+)", shown)[0])
    assert 0 < cached < total


def check_streaming(shown: str) -> None:
    assert "32 pieces; finish_reason: length" in shown
    assert re.search(r"first piece: '.+'", shown)


def check_n_and_seeds(shown: str) -> None:
    completions = re.findall(r"completion \d: (.+)", shown)
    assert len(set(completions)) == 3
    alone, company, free = re.findall(r"(?:alone|in company|no seed): +(.+)", shown)
    assert alone == company != free


def check_logprobs(shown: str) -> None:
    assert re.search(r"' France' .*%  rank \d", shown)
    assert re.search(r"' Paris' +' Paris' [\d.]+%, '.+' [\d.]+%", shown)
    assert float(shown.split("cumulative logprob:")[1]) < 0


def check_beam_search(shown: str) -> None:
    scores = [float(score) for score in re.findall(r"^ +(-[\d.]+)  ['\"]", shown, re.MULTILINE)]
    assert len(scores) == 6 and "Paris" in shown and "cold" in shown
    assert scores[3] > scores[4], "all beams of the second prompt have the same length"


def check_tool_calls(shown: str) -> None:
    called = re.search(r"^tool_calls: get_weather\((.*)\)$", shown, re.MULTILINE)
    assert called is not None and re.search("answer: .*18 degrees", shown)
    arguments = json.loads(called[1])
    assert arguments["city"] in ("Paris", "Rome", "Oslo") and set(arguments) == {"city", "unit"}


def check_prefix_caching(shown: str) -> None:
    first, second, third, salted, forgotten = map(int, re.findall(r"(\d+) of \d+ prompt", shown))
    assert first == salted == forgotten == 0
    assert second > 0 and third > 0


def check_async_serving(shown: str) -> None:
    assert len(re.findall(r"^'The \w+ is' -> ['\"].+['\"]$", shown, re.MULTILINE)) == 3
    assert "the impatient client: abort" in shown


def check_custom_model(shown: str) -> None:
    assert "LlamaForCausalLM from gguf" in shown and "vocabulary 49,152" in shown
    assert re.search(r"greedy: ['\"].+['\"]", shown)
    # 128 MiB over 22.5 KiB per token (30 layers, 3 KV heads of 64, keys and values, float16).
    assert "up to 5,824 tokens" in shown


PLANETS = {"Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"}


def check_structured_output(shown: str) -> None:
    pet = json.loads(re.findall(r"^JSON: (.+)$", shown, re.MULTILINE)[0])
    assert pet == {"species": "cat", "has_fur": True}
    assert "as an object: Pet(species='cat', has_fur=True)" in shown
    assert re.search(r"^choice: yes$", shown, re.MULTILINE)
    assert re.search(r"^regex: 1945$", shown, re.MULTILINE)
    planets = ElementTree.fromstring(re.findall(r"^XML: (.+)$", shown, re.MULTILINE)[0])
    assert [planet.tag for planet in planets] == ["planet"] * 3
    assert {planet.text for planet in planets} <= PLANETS


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_"): check
    for name, check in globals().items()
    if name.startswith("check_")
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_what_it_is_for(path: Path) -> None:
    """The purpose is the first line, so that a list of files reads as a table of contents."""
    purpose = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    assert purpose and purpose[0].endswith(".")


@pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    """As a plain file, from any folder, with nothing but text on standard output."""
    result = run(path, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "quire:" not in result.stdout
    CHECKS[path.stem](result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed")
@pytest.mark.parametrize("level", ["DEBUG", "ERROR"])
def test_tools_are_called_at_any_log_level(level: str, tmp_path: Path) -> None:
    """The example starts a server and must not depend on what that says, or does not say."""
    result = run(ROOT / "examples/tool_calls.py", tmp_path, QUIRE_LOG_LEVEL=level)
    assert result.returncode == 0, result.stderr
    assert ("DEBUG quire: " in result.stderr) == (level == "DEBUG")
    check_tool_calls(result.stdout)


def test_checks_are_of_examples() -> None:
    """A check whose example is gone checks nothing."""
    assert set(CHECKS) == {path.stem for path in EXAMPLES}


def code_of(page: str, language: str) -> list[str]:
    """Blocks of code on a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed")
@pytest.mark.parametrize("page", ["docs/usage.md", "README.md"])
def test_code_in_documentation_runs(page: str, tmp_path: Path) -> None:
    """What people copy first works, and says what its comments claim."""
    code = "\n".join(block for block in code_of(page, "python") if "OpenAI(" not in block)
    script = tmp_path / "page.py"
    script.write_text(code, encoding="utf-8")
    result = run(script, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "The future of AI is" in result.stdout
    if page == "docs/usage.md":
        assert "Paris" in result.stdout and "\nabort " in result.stdout
        assert "prompts[1]: prompt is empty; give at least one token." in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed")
def test_requests_of_the_readme_are_answered(tmp_path: Path) -> None:
    """By a server that was started as the page says, but for the port."""
    server = RunningServer.start("--num-threads", "1")
    assert server.url, "".join(server.lines)
    here = "http://127.0.0.1:8000"
    (curl,) = [block for block in code_of("README.md", "sh") if "curl" in block]
    (client,) = [block for block in code_of("README.md", "python") if "OpenAI(" in block]
    assert here in curl and here in client
    words = ["bash", "-c", curl.replace(here, server.url)]
    answered = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert json.loads(answered.stdout)["choices"][0]["message"]["content"], answered.stderr
    script = tmp_path / "client.py"
    script.write_text(client.replace(here, server.url), encoding="utf-8")
    result = run(script, tmp_path)
    assert result.returncode == 0 and result.stdout.strip(), result.stderr
    assert server.stop() == 0
