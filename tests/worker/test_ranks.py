"""Ranks that share the layers of a model, and stages that have some of them each: the same tokens,
logprobs and embeddings as transformers, for each family of models.

Turns red if a rank loads, computes or keeps the KV of anything but its share, if ranks decide
differently what to gather, or if a stage takes in what belongs to another step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from quire.config.model import load_model_config
from quire.kernels import cpu
from quire.layers.decoder import FusedLayers
from quire.layers.experts import Experts
from quire.layers.parallel import Stage
from quire.protocol.sampling import SamplingParams
from quire.worker.worker import Worker
from tests.loading.converted import convert
from tests.models.reference import VOCAB, random_tokens
from tests.tiny import greedy, logprobs, save_tiny
from tests.worker.rank_driver import BLOCK_SIZE, Asked, Made, Ran, run

NUM_TOKENS = 6
SIZES = [(2, 1), (3, 1), (1, 2), (2, 2)]
"""Ranks of a stage, and stages."""
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
"""One layer sees everything, two see a window: three KV groups, of which no stage has all."""
# 3 ranks divide neither the width of the network nor the heads nor the vocabulary.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"intermediate_size": 100}),
    "llama-tied": ("llama", {"intermediate_size": 100, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"intermediate_size": 100, "sliding_window": 20}),
    "qwen2": ("qwen2", {"intermediate_size": 100, **WINDOWS}),
    "qwen3": ("qwen3", {"intermediate_size": 100}),
    "opt": ("opt", {"ffn_dim": 100, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", {"n_inner": 100}),
    "granite": ("granite", {"intermediate_size": 100}),
    "smollm3": ("smollm3", {"intermediate_size": 100}),
    "phi3": ("phi3", {"intermediate_size": 100}),
    "olmo2": ("olmo2", {"intermediate_size": 100}),
    "glm4": ("glm4", {"intermediate_size": 100}),
    "gemma2": ("gemma2", {"intermediate_size": 100}),
    "gemma3": ("gemma3", {"intermediate_size": 100, "num_key_value_heads": 1}),
    "gpt_oss": ("gpt_oss", {}),
    "mixtral": ("mixtral", {"intermediate_size": 100}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "granitemoe": ("granitemoe", {"intermediate_size": 100}),
    "glm4_moe": ("glm4_moe", {"n_group": 4, "topk_group": 2}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
PROMPTS = [random_tokens(length, seed=length) for length in (30, 11, 21, 14, 25, 12)]
REQUESTS = [
    Asked(PROMPTS[0]),
    Asked(PROMPTS[1], SamplingParams(temperature=0.0, logprobs=3)),
    Asked(PROMPTS[2], SamplingParams(temperature=0.0, prompt_logprobs=2)),
    Asked(PROMPTS[3], SamplingParams(seed=1, frequency_penalty=1.0, allowed_token_ids=[*range(8)])),
    Asked(PROMPTS[4], pooling="last"),
    Asked(PROMPTS[5], pooling="mean"),
]


@dataclass(frozen=True)
class Saved:
    folder: Path
    model: PreTrainedModel
    alone: list[Made]
    """What one rank makes."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    @cache
    def save(name: str) -> Saved:
        family, changes = FAMILIES[name]
        folder = tmp_path_factory.mktemp(name)
        model = save_tiny(folder, family, **changes)
        return Saved(folder, model, run(folder, REQUESTS, NUM_TOKENS).made)

    return save


def families_and_sizes() -> list[Any]:
    """Quick are all sizes of the families with layers of their own kind, and of the others the one
    with padding."""
    quick = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "opt", "gpt2", "deepseek_v3")
    return [
        pytest.param(
            name, *sizes, marks=() if name in quick or sizes == (3, 1) else pytest.mark.slow
        )
        for name in FAMILIES
        for sizes in SIZES
    ]


@pytest.mark.parametrize(("name", "size", "num_stages"), families_and_sizes())
def test_ranks_and_stages_compute_the_same(
    name: str, size: int, num_stages: int, saved: Callable[[str], Saved]
) -> None:
    """Prompts in chunks, several steps in flight, and all that a request can ask for."""
    one = saved(name)
    made = run(one.folder, REQUESTS, NUM_TOKENS, size, num_stages).made
    for index, expected in enumerate(greedy(one.model, PROMPTS[:3], NUM_TOKENS)):
        assert made[index].tokens[:NUM_TOKENS] == expected, index
    check_logprobs(one.model, made[1])
    check_prompt_logprobs(one.model, made[2])
    # Random numbers and penalties: of the same logits the same tokens.
    count = len(made[3].tokens)
    assert count >= NUM_TOKENS and made[3].tokens == one.alone[3].tokens[:count]
    check_pooled(one.model, made)


def few_experts(count: int, top_k: int) -> tuple[str, dict[str, Any]]:
    return "mixtral", {"num_local_experts": count, "num_experts_per_tok": top_k}


@pytest.mark.parametrize(
    ("model", "size", "num_stages"),
    [
        (("mixtral", {}), 4, 1),  # 5 experts
        (few_experts(3, 2), 4, 1),  # a rank without any
        (("qwen2_moe", {}), 2, 2),
        (("granitemoe", {}), 3, 1),  # which has its 5 experts in one tensor
        (("deepseek_v3", {}), 3, 1),
        (("gpt_oss", {}), 2, 2),  # whose experts have biases
    ],
    ids=["mixtral-4", "few-4", "qwen2_moe-2-2", "granitemoe-3", "deepseek_v3-3", "gpt_oss-2-2"],
)
def test_ranks_with_whole_experts(
    model: tuple[str, dict[str, Any]], size: int, num_stages: int, tmp_path: Path
) -> None:
    """Each expert is on one rank of its stage, and ranks hold nothing of the others."""
    reference = save_tiny(tmp_path, model[0], **model[1])
    asked = [Asked(prompt) for prompt in PROMPTS[:2]]
    ran = run(tmp_path, asked, NUM_TOKENS, size, num_stages, enable_expert_parallel=True)
    made = [one.tokens[:NUM_TOKENS] for one in ran.made]
    assert made == greedy(reference, PROMPTS[:2], NUM_TOKENS)
    count = load_model_config(str(tmp_path)).experts.count
    for first in range(0, size * num_stages, size):
        by_rank = (experts_of(worker) for worker in ran.workers[first : first + size])
        layers = zip(*by_rank, strict=True)
        for shares in layers:
            assert sorted(expert for share in shares for expert in share.kept) == [*range(count)]
            for share in shares:
                layer = share.gate_up_proj
                assert layer.kept_experts == share.kept
                assert layer.stack is not None or list(share.kept) == sorted(layer.by_expert)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "granitemoe", "qwen2_moe"])
def test_a_step_without_tokens(name: str, saved: Callable[[str], Saved]) -> None:
    """As every second one is with two stages and a single request."""
    one = saved(name)
    (made,) = run(one.folder, REQUESTS[:1], NUM_TOKENS, 1, 2).made
    assert [made.tokens[:NUM_TOKENS]] == greedy(one.model, PROMPTS[:1], NUM_TOKENS)


def experts_of(worker: Worker) -> list[Experts]:
    return [module for module in worker._model.modules() if isinstance(module, Experts)]


def check_logprobs(model: PreTrainedModel, made: Made) -> None:
    lines = logprobs(model, [*PROMPTS[1], *made.tokens])[len(PROMPTS[1]) - 1 : -1]
    assert len(made.logprobs) == len(made.tokens)
    for token, found, line in zip(made.tokens, made.logprobs, lines, strict=True):
        assert found.token_ids[0, 0] == token and found.ranks.tolist() == [1]
        expected = line[torch.from_numpy(found.token_ids[0]).long()]
        np.testing.assert_allclose(found.logprobs[0], expected, atol=2e-3)


def check_prompt_logprobs(model: PreTrainedModel, made: Made) -> None:
    prompt = PROMPTS[2]
    lines = logprobs(model, prompt)
    positions = np.concatenate([arrays.index for arrays in made.prompt_logprobs])
    assert positions.tolist() == list(range(1, len(prompt)))
    for arrays in made.prompt_logprobs:
        for position, ids, found in zip(
            arrays.index, arrays.token_ids, arrays.logprobs, strict=True
        ):
            assert ids[0] == prompt[position]
            expected = lines[position - 1][torch.from_numpy(ids).long()]
            np.testing.assert_allclose(found, expected, atol=2e-3)


@torch.no_grad()
def check_pooled(model: PreTrainedModel, made: list[Made]) -> None:
    for index, kind in ((4, "last"), (5, "mean")):
        hidden = model.base_model(torch.tensor([PROMPTS[index]])).last_hidden_state[0]
        expected = hidden[-1] if kind == "last" else hidden.mean(0)
        (vector,) = made[index].pooled
        np.testing.assert_allclose(vector, expected, atol=1e-3)


@pytest.mark.parametrize(("size", "num_stages"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
def test_a_rank_keeps_the_keys_and_values_of_its_layers_and_heads(
    size: int, num_stages: int, saved: Callable[[str], Saved]
) -> None:
    """Tables are those of the whole model on every stage; with four ranks a KV head is kept by
    two."""
    ran = run(saved("qwen2").folder, [Asked(PROMPTS[0])], 1, size, num_stages)
    for rank, worker in enumerate(ran.workers):
        stage = Stage(rank // size, num_stages)
        layout = worker.layout
        assert layout.windows == (None, 20, 20)
        layers = [layer for group in layout.groups for layer in group.layers]
        assert layers == list(stage.layers(3))
        slots, both, _, kv_heads, *shape = worker.runner.kv.data.shape
        assert (slots, both, kv_heads) == (1, 2, max(2 // size, 1))
        assert shape == [BLOCK_SIZE, 16]
        assert layout.bytes_per_block == worker.runner.kv.data[:, :, 0].nbytes


def test_stages_spread_their_layers_over_the_groups(tmp_path: Path) -> None:
    """2 layers that see everything and 10 with a window are 6 groups of 2 layers; half of the
    layers need half of a block, and each stage says for itself how many blocks it can have."""
    changes = {**WINDOWS, "num_hidden_layers": 12, "layer_types": layer_types(12, (0, 6))}
    save_tiny(tmp_path, "qwen2", **changes)
    asked, options = [Asked(PROMPTS[0])], {"kv_cache_memory_bytes": 1 << 20}
    options["num_gpu_blocks_override"] = None
    (whole,) = run(tmp_path, asked, 1, **options).workers
    first, last = run(tmp_path, asked, 1, 1, 2, **options).workers
    assert whole.layout.num_slots == 2 and len(whole.layout.groups) == 6
    for half in (first, last):
        assert half.layout.windows == whole.layout.windows
        assert half.layout.num_slots == 1
        assert half.runner.kv.num_blocks == 2 * whole.runner.kv.num_blocks


def layer_types(count: int, full: tuple[int, ...]) -> list[str]:
    kinds = ("sliding_attention", "full_attention")
    return [kinds[layer in full] for layer in range(count)]


def gathered(ran: Ran) -> list[int]:
    """Numbers that each rank has given to others."""
    return [worker._parallel.group.num_gathered for worker in ran.workers]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_what_ranks_of_a_vocabulary_tell_each_other(
    num_stages: int, saved: Callable[[str], Saved]
) -> None:
    """Greedy requests: a value and an id of each line. Where one of a step asks for more, all
    logits of the step; with two stages the two requests are in different steps. Only the last stage
    has any."""
    folder, share = saved("llama").folder, VOCAB // 2
    before = [0, 0] * (num_stages - 1)
    plain = run(folder, [Asked(PROMPTS[1])] * num_stages, 4, 2, num_stages)
    lines = sum(len(made.tokens) for made in plain.made)
    assert gathered(plain) == [*before, 2 * lines, 2 * lines]
    params = SamplingParams(temperature=0.0, logit_bias={3: 100.0})
    both = run(folder, [Asked(PROMPTS[1]), Asked(PROMPTS[1], params)], 4, 2, num_stages)
    assert both.made[0].tokens == plain.made[0].tokens
    assert set(both.made[1].tokens) == {3}
    counts = [len(made.tokens) for made in both.made]
    told = share * sum(counts) if num_stages == 1 else 2 * counts[0] + share * counts[1]
    assert gathered(both) == [*before, told, told]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_masks_of_the_rank_that_samples(num_stages: int, saved: Callable[[str], Saved]) -> None:
    """The others know of a grammar from the request alone. Allowed tokens are in the last rank's
    share, beside a request that is free."""
    params = SamplingParams(temperature=0.0, structured_outputs={"choice": ["any"]})
    asked = [Asked(PROMPTS[1]), Asked(PROMPTS[1], params, grammar=[150, 158])]
    one, two = run(saved("llama").folder, asked, NUM_TOKENS, 2, num_stages).made
    (alone,) = run(saved("llama").folder, asked[1:], NUM_TOKENS).made
    assert set(two.tokens) <= {150, 158} and two.tokens == alone.tokens[: len(two.tokens)]
    assert one.tokens[:NUM_TOKENS] == greedy(saved("llama").model, PROMPTS[1:2], NUM_TOKENS)[0]


def test_a_model_of_more_stages_than_two(saved: Callable[[str], Saved]) -> None:
    """A stage in the middle has neither embeddings nor head, and names its layer as the file."""
    one = saved("llama")
    ran = run(one.folder, REQUESTS, NUM_TOKENS, 1, 3)
    for index, expected in enumerate(greedy(one.model, PROMPTS[:3], NUM_TOKENS)):
        assert ran.made[index].tokens[:NUM_TOKENS] == expected
    names = [
        {name for name, _ in worker._model.named_modules() if name.count(".") <= 2}
        for worker in ran.workers
    ]
    assert names[1] == {"", "model", "model.rotary", "model.layers", "model.layers.1"}
    for worker in ran.workers:
        layers = worker._model.get_submodule("model.layers")
        assert isinstance(layers, FusedLayers)
        if cpu.available()[0]:
            assert [one.decoder is not None for one in layers.runs] == [True]  # in one call
    assert "model.embed_tokens" in names[0] and "lm_head" in names[2]
    assert "model.embed_tokens" not in names[2] and "model.norm" in names[2]


def test_weights_and_their_count_are_those_of_the_rank(saved: Callable[[str], Saved]) -> None:
    """What is foretold is what is held; ranks together hold the model, tied embeddings twice."""
    for name in ("llama", "llama-tied"):
        folder = saved(name).folder
        (whole,) = run(folder, REQUESTS[:1], 1).workers
        parts = run(folder, REQUESTS[:1], 1, 1, 2).workers
        embedding = VOCAB * 64 * 4
        rotary = whole._model.get_buffer("model.rotary.cos").nbytes * 2
        total = sum(part.memory().weights for part in parts)
        expected = whole.memory().weights + rotary + embedding * (name == "llama-tied")
        assert total == expected


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize(
    ("quantization", "kind", "width", "bound"),
    [
        ("int8", None, 192, 1e-2),
        ("int8", None, 96, 0.1),  # two ranks compute from numbers what one has in blocks
        ("gguf", "Q8_0", 192, 1e-2),
        ("gguf-a16", "Q8_0", 96, 1e-3),
        ("gguf-a16", "Q4_0", 448, 1e-3),  # two and three ranks have different numbers of blocks
        (None, "Q8_0", 96, 1e-3),
    ],
)
def test_packed_weights_are_divided(
    quantization: str | None,
    kind: str | None,
    width: int,
    bound: float,
    size: int,
    num_stages: int,
    tmp_path: Path,
) -> None:
    """The logprobs of one rank with the same weights, but for the order of sums and the rounding of
    activations. Heads have 32 numbers, as blocks do; three ranks have two KV heads."""
    model = save_tiny(tmp_path, intermediate_size=width, hidden_size=128)
    path = tmp_path
    if kind is not None:
        path = convert(model, "llama", tmp_path / "model.gguf", kind)
    params = SamplingParams(temperature=0.0, prompt_logprobs=VOCAB)
    settings = {"quantization": quantization, "dtype": "auto" if quantization else "float32"}

    def found(*ranks: int) -> np.ndarray:
        (made,) = run(path, [Asked(PROMPTS[0], params)], 1, *ranks, **settings).made
        lines = np.zeros((len(PROMPTS[0]) - 1, VOCAB))
        for arrays in made.prompt_logprobs:
            for position, ids, values in zip(
                arrays.index, arrays.token_ids, arrays.logprobs, strict=True
            ):
                lines[position - 1, ids] = values
        return lines

    alone = found()
    difference = found(size, num_stages) - alone
    assert np.linalg.norm(difference) < bound * np.linalg.norm(alone - alone.mean(-1)[:, None])
