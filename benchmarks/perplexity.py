"""Perplexity of the embedded model at each precision of Quire, next to transformers.

    python benchmarks/perplexity.py
    python benchmarks/perplexity.py --tokens 100000 --precisions fp32 gguf --json perplexity.json

A text is cut into windows of equal length; in each, all tokens but the first are predicted from
those before them. The text is by default wikitext2_valid.txt in the folder text of the one that
QUIRE_TEST_DATA names. transformers computes in float32 with the same dequantised weights. Ends with
status 1 if a precision is further from what it is compared with than it should be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import markdown_table, say
from quire import LLM, SamplingParams
from quire.bench.static_batches import load_model
from quire.config.model import load_model_config
from quire.protocol.errors import OptionError
from quire.text.tokenizer import load_tokenizer

ENGINES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "gguf": {"quantization": "gguf"},
    "gguf-a16": {"quantization": "gguf-a16"},
}
"""Options of an engine for each precision."""


@dataclass(frozen=True)
class Aim:
    """How far a perplexity may be from another one, as a share of it."""

    compared_with: str
    share: float


AIMS = {
    "fp32": Aim("transformers", 0.001),
    "int8": Aim("fp32", 0.01),
    "gguf": Aim("fp32", 0.005),
    "gguf-a16": Aim("fp32", 0.001),
}

Windows = list[list[int]]


def read_windows(path: Path, num_tokens: int, window: int) -> Windows:
    """As many whole windows as `num_tokens` make, spread evenly over the text."""
    tokens = load_tokenizer(load_model_config(None).source).encode(
        path.read_text(encoding="utf-8"), add_special_tokens=False
    )
    available, wanted = len(tokens) // window, num_tokens // window
    if not 1 <= wanted <= available:
        raise SystemExit(
            f"perplexity.py: {num_tokens} tokens are {wanted} windows of {window}; the text has "
            f"from 1 to {available}."
        )
    starts = [window * (available * index // wanted) for index in range(wanted)]
    return [tokens[start : start + window] for start in starts]


def perplexity(losses: Sequence[float]) -> float:
    """Of tokens whose negative log probabilities are given."""
    return math.exp(math.fsum(losses) / len(losses))


def quire_losses(windows: Windows, engine: dict[str, Any]) -> list[float]:
    """Negative log probabilities of all predicted tokens, through the public API."""
    longest = max(map(len, windows))
    wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM(max_model_len=longest + 1, max_num_seqs=8, **engine) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": window} for window in windows], wanted, use_tqdm=False
        )
    losses = []
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(window[1:], list(output.prompt_logprobs)[1:], strict=True):
            assert entry is not None
            losses.append(-entry[token].logprob)
    return losses


def transformers_losses(windows: Windows, model: Any) -> list[float]:
    """The same of a transformers model, window by window."""
    import torch

    losses: list[float] = []
    for window in windows:
        with torch.inference_mode():
            logits = model(torch.tensor([window]), use_cache=False).logits[0, :-1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(window[1:])[:, None])
        losses += (-chosen[:, 0]).tolist()
    return losses


def measure(windows: Windows, precisions: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Perplexities, and why some are missing."""
    reference = load_model(load_model_config(None), "float32", "auto")
    found = {"transformers": perplexity(transformers_losses(windows, reference))}
    del reference
    missing = {}
    for name in precisions:
        try:
            found[name] = perplexity(quire_losses(windows, ENGINES[name]))
        except OptionError as error:
            missing[name] = str(error)
    return found, missing


def difference(found: dict[str, float], name: str) -> float | None:
    """By which share a perplexity is above what it is compared with; None without that."""
    aim = AIMS.get(name)
    if aim is None or aim.compared_with not in found:
        return None
    return found[name] / found[aim.compared_with] - 1


def table(found: dict[str, float]) -> str:
    rows = []
    for name, value in found.items():
        change, cells = difference(found, name), ["", "", ""]
        if change is not None:
            aim = AIMS[name]
            cells = [aim.compared_with, f"{100 * change:+.3f} %", f"{100 * aim.share:g} %"]
        rows.append([name, f"{value:.4f}", *cells])
    return markdown_table(["precision", "perplexity", "next to", "difference", "at most"], rows)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=20480, help="about how many to look at")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--precisions", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(words)
    folder = os.environ.get("QUIRE_TEST_DATA")
    if arguments.text is None and not folder:
        raise SystemExit("perplexity.py: give --text FILE, or set QUIRE_TEST_DATA.")
    path = Path(arguments.text or Path(folder or "") / "text" / "wikitext2_valid.txt")
    windows = read_windows(path, arguments.tokens, arguments.window)
    found, missing = measure(windows, arguments.precisions)
    say(f"{len(windows)} windows of {arguments.window} tokens of {path.name}\n")
    say(table(found))
    for name, reason in missing.items():
        say(f"\nnot available: {name}: {reason}")
    if arguments.json:
        figures = {"windows": len(windows), "window": arguments.window, "perplexity": found}
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    changes = {name: difference(found, name) for name in found}
    beyond = [n for n, change in changes.items() if change and abs(change) > AIMS[n].share]
    for name in beyond:
        say(f"\n{name} is further from {AIMS[name].compared_with} than it should be.")
    return 1 if beyond else 0


if __name__ == "__main__":
    raise SystemExit(main())
