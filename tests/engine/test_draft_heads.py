"""EAGLE-3 and MTP heads: they draft what straightforward code drafts, and no text changes.

The layers of MTP heads are transformers' own; those of EAGLE-3 are written out in
`tests.draft_heads`. Both compute whole sequences at once, the engine in pieces, with its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.protocol.errors import ModelError, OptionError
from quire.protocol.plan import StepPlan
from tests.draft_heads import (
    Eagle3,
    Layer,
    drafts,
    mtp_layer,
    random_eagle3,
    save_eagle3,
    save_mtp,
    save_speculators,
    target_states,
)
from tests.engine.test_drafts import FEATURES, MAX_LEN, generate, prompts_of, seen
from tests.models.reference import VOCAB, random_tokens
from tests.tiny import assert_at_rest, save_tiny, tiny_llm

pytestmark = pytest.mark.usefixtures("native")
TIE = 1e-3


class Recorder:
    """What a drafter proposes, with the tokens that it is proposed behind."""

    def __init__(self, llm: LLM) -> None:
        runner = llm._core.executor.runner
        self._table, self._drafter = runner.table, runner.drafter
        self.proposed: list[tuple[list[int], list[int]]] = []
        runner.drafter = self

    def update(self, plan: StepPlan) -> None:
        self._drafter.update(plan)

    def accepted(self, rows: Tensor, counts: Tensor) -> None:
        self._drafter.accepted(rows, counts)

    def propose(self, rows: Tensor) -> Tensor:
        known = [self._table.token_ids[row, : self._table.num_tokens[row]].tolist() for row in rows]
        found = self._drafter.propose(rows)
        self.proposed += zip(known, found.tolist(), strict=True)
        return found


def assert_drafted(
    recorder: Recorder, layer: Layer, states: Callable[[list[int]], Tensor], least: int
) -> None:
    """All that was proposed is most likely by the reference, ties aside."""
    compared = 0
    for known, found in recorder.proposed:
        expected, distance = drafts(layer, states(known[:-1]), torch.tensor(known[1:]), len(found))
        if distance > TIE:
            assert found == expected, f"behind {len(known)} tokens"
            compared += 1
    assert compared >= least


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm-first": {"norm_before_residual": True},
    "own-embedding": {"own_embedding": True},
    "whole-vocabulary": {"draft_vocab": VOCAB},
    "other-layers": {"layer_ids": (0, 4, 1), "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return save_tiny(folder, num_hidden_layers=6)


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def run_greedy(llm: LLM) -> None:
    """Twice, so that the second time finds prompts in the cache, the part of a block included."""
    prompts = [random_tokens(9 + 6 * i, seed=200 + i) for i in range(4)]
    for _ in range(2):
        outputs = generate(llm, prompts, GREEDY)
    assert all(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("save", [save_eagle3, save_speculators], ids=["SafeAILab", "speculators"])
@pytest.mark.parametrize("kind", HEADS)
def test_eagle3_drafts_what_the_reference_drafts(
    folder: Path, target: Any, tmp_path: Path, kind: str, save: Callable[..., Path]
) -> None:
    head = random_eagle3(target, **HEADS[kind])
    config: dict[str, Any] = {"model": str(save(tmp_path, head, target))}
    if save is save_eagle3:
        config |= {"method": "eagle3", "num_speculative_tokens": 3}
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 15, "max_num_seqs": 3}
    with tiny_llm(
        folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config, **options
    ) as llm:
        recorder = Recorder(llm)
        run_greedy(llm)
    num_layers = target.config.num_hidden_layers
    assert all(len(found) == 3 for _, found in recorder.proposed)

    def states(tokens: list[int]) -> Tensor:
        return head.combine(target_states(target, tokens), num_layers)

    assert_drafted(recorder, head.layer, states, least=60)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_drafts_what_transformers_drafts(tmp_path: Path, family: str) -> None:
    model, mtp = save_mtp(tmp_path, family)
    config = {"method": "mtp", "num_speculative_tokens": 3}
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 15, "max_num_seqs": 3}
    with tiny_llm(
        tmp_path, device="cpu", max_model_len=MAX_LEN, speculative_config=config, **options
    ) as llm:
        recorder = Recorder(llm)
        run_greedy(llm)
    assert_drafted(
        recorder, mtp_layer(mtp), lambda tokens: target_states(model, tokens)[-1], least=60
    )
