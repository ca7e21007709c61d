"""A row table with a sampler, as the model runner has, and the same requests in plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.sampler import Sampled, Sampler
from quire.protocol.plan import AddedRow
from quire.protocol.sampling import SamplingParams
from tests.decoding import reference


@dataclass
class Sketch:
    """One request as the reference sees it."""

    params: SamplingParams
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def known(self) -> list[int]:
        return self.prompt + self.generated

    def expected(self, logits: NDArray[np.float32]) -> int:
        logits = reference.processed(
            logits, self.params, self.prompt, self.generated, self.stop_token_ids
        )
        return reference.chosen(logits, self.params, self.seed, len(self.known))


class Table:
    def __init__(
        self, vocab_size: int, max_rows: int = 8, max_len: int = 64, device: str = "cpu"
    ) -> None:
        self.token_ids = torch.zeros((max_rows, max_len), dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.sampler = Sampler(vocab_size, max_rows, device, self.token_ids, self.num_tokens)
        self.device = device

    def add(
        self,
        row: int,
        request: Sketch,
        num_logprobs: int = -1,
    ) -> None:
        known = np.array(request.known, np.int32)
        self.token_ids[row, : len(known)] = torch.from_numpy(known).to(self.device)
        self.num_tokens[row] = len(known)
        added = AddedRow(
            row,
            known,
            num_prompt_tokens=len(request.prompt),
            num_computed_tokens=0,
            params=request.params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            num_logprobs=num_logprobs,
        )
        self.sampler.add(added, known)

    def sample(
        self,
        logits: NDArray[np.float32] | Tensor,
        rows: Sequence[int],
        offsets: Sequence[int] | None = None,
    ) -> Sampled:
        if not isinstance(logits, Tensor):
            logits = torch.from_numpy(logits)
        before = None
        if offsets is not None:
            before = torch.tensor(offsets, dtype=torch.int32, device=self.device)
        index = torch.tensor(rows, device=self.device)
        return self.sampler.sample(
            logits.to(self.device), index, np.array(rows, np.int32), offsets=before
        )

    def draft(self, row: int, tokens: Sequence[int]) -> None:
        """Put drafts behind the known tokens of a row, as the runner does."""
        at = int(self.num_tokens[row])
        drafts = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        self.token_ids[row, at : at + len(tokens)] = drafts

    def append(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Write sampled tokens into the table, as the runner does."""
        index = torch.tensor(rows, device=self.device)
        self.token_ids[index, self.num_tokens[index].long()] = tokens
        self.num_tokens[index] += 1
        self.sampler.appended(index, tokens)


def random_logits(seed: int, *shape: int, spread: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, shape).astype(np.float32)
