"""How many tokens each expert got: in the engine's record, its metrics and its summary.

Compared with: the routers of transformers over the same tokens. Counts that include what fills up a
graph, that leave out a chunk or a layer, or that a rank adds a second time turn these red.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.experts import ExpertsConfig
from quire.layers.expert_counts import ExpertCounter
from quire.layers.experts import Router
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import Build
from quire.models.loader import ONE_RANK
from quire.protocol.codec import Decoder, encode
from quire.protocol.expert_counts import ExpertCounts
from tests.tiny import save_tiny, tiny_llm

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [20, 21, 22, 23, 24]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def metrics(llm: LLM) -> dict[tuple[str, ...], float]:
    return {
        (metric.name.removeprefix("quire:"), *metric.labels.values()): metric.value  # type: ignore[attr-defined]
        for metric in llm.get_metrics()
        if "expert" in metric.name
    }


def test_counts_are_those_of_the_routers(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen3_moe", mlp_only_layers=[0])
    with tiny_llm(tmp_path, max_num_batched_tokens=4, dtype="float32") as llm:
        assert llm._core.expert_counts().tokens.tolist() == [[0] * 7] * 2
        found = answers(llm)
        counts, num_steps = llm._core.expert_counts(), llm.statistics().num_steps
        values, mean = metrics(llm), llm.statistics().experts_per_step
    expected = np.zeros((2, 7), np.int64)
    for prompt, text in zip(PROMPTS, found, strict=True):
        computed = torch.tensor([[*prompt, *text[:-1]]])
        logits = model(computed, output_router_logits=True).router_logits
        for layer, of_layer in enumerate(one for one in logits if one is not None):
            chosen = of_layer.view(-1, 7).topk(3).indices.flatten()
            expected[layer] += np.bincount(chosen.numpy(), minlength=7)
    assert counts.layers == [1, 2] and counts.num_steps == num_steps
    assert counts.tokens.tolist() == expected.tolist()
    for layer, (tokens, used) in enumerate(zip(expected, counts.used, strict=True), start=1):
        assert 3 <= used / num_steps <= 7
        assert values["experts_used", str(layer)] == (tokens > 0).sum()
        assert values["experts_used_per_step", str(layer)] == used / num_steps
        assert values["expert_busiest_share", str(layer)] == tokens.max() / tokens.sum()
    assert mean == counts.used.sum() / num_steps / 2


def test_models_without_experts_show_nothing(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with tiny_llm(tmp_path) as llm:
        answers(llm)
        assert llm._core.expert_counts().layers == []
        assert metrics(llm) == {} and llm.statistics().experts_per_step is None


def make_routers(count: int) -> torch.nn.ModuleList:
    build = Build(torch.float32, torch.device("cpu"), ONE_RANK, lambda path: Unquantized())
    config = ExpertsConfig(5, 2, 8, (True,) * count)
    routers = [Router(config, 4, build / f"layers.{i + 3}.gate") for i in range(count)]
    for router in routers:
        torch.nn.init.normal_(router.get_parameter("weight"))
    return torch.nn.ModuleList(routers)


def test_what_fills_up_a_step_is_not_counted() -> None:
    torch.manual_seed(0)
    routers = make_routers(2)
    counter = ExpertCounter.of(routers, torch.device("cpu"))
    assert counter is not None
    expected, used = np.zeros((2, 5), np.int64), np.zeros(2, np.int64)
    for is_real in ([True] * 3, [True, False, True, False], [False] * 2):
        mask = torch.tensor(is_real)
        for layer, router in enumerate(routers):
            chosen = router(torch.randn(len(is_real), 4)).experts[mask]
            expected[layer] += np.bincount(chosen.flatten().numpy(), minlength=5)
            used[layer] += len(chosen.unique())
        counter.take(mask)
    counts = counter.read()
    assert counts.layers == [3, 4] and counts.num_steps == 3
    assert counts.tokens.tolist() == expected.tolist() and counts.used.tolist() == used.tolist()
    counter.reset()
    assert not counter.read().tokens.any() and counter.read().num_steps == 0
    assert counts.tokens.sum() == expected.sum(), "what was read does not change"


def test_ranks_are_joined() -> None:
    """Two stages of two ranks: those of a stage have counted the same."""

    def part(layers: list[int], seed: int) -> ExpertCounts:
        rng = np.random.default_rng(seed)
        return ExpertCounts(
            layers, rng.integers(0, 9, (len(layers), 4)), np.full(len(layers), 6), 2
        )

    first, last = part([1, 2], 1), part([3], 2)
    joined = ExpertCounts.joined([first, first, last, last])
    assert joined.layers == [1, 2, 3] and joined.num_steps == 2
    assert joined.tokens.tolist() == [*first.tokens.tolist(), *last.tokens.tolist()]
    assert joined.used_per_step.tolist() == [3.0] * 3
    later = ExpertCounts([3], last.tokens + 5, last.used + 9, 5).since(last)
    assert later.tokens.tolist() == [[5] * 4] and later.mean_used == 3.0
    assert ExpertCounts.joined([ExpertCounts.none(), last]).layers == [3]
    assert ExpertCounts.joined([ExpertCounts.none()] * 2).layers == []


@pytest.mark.parametrize("seed", [None, 1])
def test_they_cross_a_socket(seed: int | None) -> None:
    counts = ExpertCounts.none()
    if seed is not None:
        tokens = np.arange(6).reshape(2, 3)
        counts = ExpertCounts([4, 7], tokens, tokens.sum(1), 3)
    received = Decoder[ExpertCounts](ExpertCounts).decode(encode(counts))
    assert received.layers == counts.layers and received.tokens.tolist() == counts.tokens.tolist()
    assert received.used_per_step.tolist() == counts.used_per_step.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_count_as_one_does(expert_parallel: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2}
    with tiny_llm(tmp_path, **options) as one:
        found = answers(one)
        expected = one._core.expert_counts()
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with tiny_llm(tmp_path, **options, **ranks, enable_expert_parallel=expert_parallel) as four:
        assert answers(four) == found
        counts = four._core.expert_counts()
    assert counts.layers == expected.layers == [0, 1, 2]
    assert counts.tokens.tolist() == expected.tokens.tolist()
