"""How far the predictions of one engine are from those of another, token by token of given texts.

The engines run one after the other, so that only one is in memory. Between them, the first one's
predictions lie in a file without a name, in half precision: 2 bytes for each token of the text and
each of the vocabulary. They are normalised again when they are read, so that what is measured is
the divergence from a distribution, whatever was rounded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from quire import LLM

Windows = Sequence[Sequence[int]]
Progress = Callable[[str], None]
Take = Callable[[slice, "Tensor", "Tensor"], None]
"""Given which lines these are, logits [lines, vocabulary], and the tokens that follow."""


@dataclass(frozen=True)
class Predictions:
    """What an engine expects for each token of all windows but their first ones."""

    losses: NDArray[np.float64]
    """Negative log-probabilities of the tokens."""
    likeliest: NDArray[np.int64]
    """Most likely tokens."""
    likelihoods: NDArray[np.float64]
    """Probabilities of these."""

    @classmethod
    def of(cls, windows: Windows) -> Predictions:
        count = sum(len(window) - 1 for window in windows)
        return cls(np.zeros(count), np.zeros(count, np.int64), np.zeros(count))

    @property
    def perplexity(self) -> float:
        return exp(float(self.losses.mean()))

    def write(self, lines: slice, logprobs: Tensor, targets: Tensor) -> None:
        self.losses[lines] = -logprobs.gather(1, targets[:, None])[:, 0].double().cpu().numpy()
        best, tokens = logprobs.max(-1)
        self.likeliest[lines] = tokens.cpu().numpy()
        self.likelihoods[lines] = best.double().exp().cpu().numpy()


@dataclass(frozen=True)
class Comparison:
    base: Predictions
    model: Predictions
    divergences: NDArray[np.float64]
    """KL divergence of the model from the base in each line, over the whole vocabulary."""

    @property
    def same_top1(self) -> float:
        """Share of lines with the same most likely token."""
        return float((self.base.likeliest == self.model.likeliest).mean())


class RecordedPredictions:
    """Those of the first engine, kept to be compared with."""

    def __init__(self, windows: Windows, vocab_size: int) -> None:
        self._windows = windows
        self.predictions = Predictions.of(windows)
        shape = len(self.predictions.losses), vocab_size
        with tempfile.TemporaryFile() as file:  # the mapping keeps it
            self._stored = np.memmap(file, np.float16, "w+", shape=shape)

    def record(self, llm: LLM, progress: Progress) -> None:
        def take(lines: slice, logits: Tensor, targets: Tensor) -> None:
            logprobs = logits.float().log_softmax(-1)
            self.predictions.write(lines, logprobs, targets)
            self._stored[lines] = logprobs.half().cpu().numpy()

        _run(llm, self._windows, take, progress)

    def compare(self, llm: LLM, progress: Progress) -> Comparison:
        model = Predictions.of(self._windows)
        divergences = np.zeros(len(model.losses))

        def take(lines: slice, logits: Tensor, targets: Tensor) -> None:
            logprobs = logits.float().log_softmax(-1)
            model.write(lines, logprobs, targets)
            base = logprobs.new_tensor(self._stored[lines]).log_softmax(-1)
            probabilities = base.exp()
            terms = probabilities * (base - logprobs)
            terms.masked_fill_(probabilities == 0, 0)
            divergences[lines] = terms.sum(-1).clamp_(min=0).cpu().numpy()

        _run(llm, self._windows, take, progress)
        return Comparison(self.predictions, model, divergences)


def _run(llm: LLM, windows: Windows, take: Take, progress: Progress) -> None:
    """Compute each window as a prompt; nothing is taken from the prefix cache."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        skip_reading_prefix_cache=True,
    )
    executor: Any = llm._core.executor
    first, window = 0, windows[0]

    def on_logits(positions: NDArray[np.int32], logits: Tensor) -> None:
        start = int(positions[0])
        targets = logits.new_tensor(window[start : start + len(positions)]).long()
        lines = slice(first + start - 1, first + start - 1 + len(positions))
        take(lines, logits, targets)

    executor.runner.prompt_logprobs.on_logits = on_logits
    for number, window in enumerate(windows, 1):
        progress(f"text {number} of {len(windows)}")
        llm.generate({"prompt_token_ids": list(window)}, params, use_tqdm=False)
        first += len(window) - 1
    executor.runner.prompt_logprobs.on_logits = None
