"""transformers' `generate` over static batches: what an engine without paging is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.bench.steps import MemoryStep, Slots
from quire.bench.workload import BenchRequest
from quire.protocol.errors import QuireError

if TYPE_CHECKING:
    from quire.config.model import ModelConfig

PAD = 0


@dataclass(frozen=True)
class StaticRun:
    """All requests in batches of equal size, in order; a batch lasts as long as its longest."""

    seconds: float
    cpu_s: float
    tokens: list[list[int]]
    """What was generated, per request."""
    steps: list[MemoryStep]
    """One per forward pass."""


def load_model(model: ModelConfig, dtype: str, load_format: str) -> Any:
    """The model of the benchmark in transformers, with the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in model.raw.items() if name != "model_type"}
    settings["rope_theta"] = model.rope_theta
    if model.rope_scaling is not None:
        settings["rope_scaling"] = model.rope_scaling
    config = AutoConfig.for_model(model.model_type, **settings)
    kind = getattr(torch, dtype)
    if load_format != "dummy" and model.source.kind == "folder":
        return AutoModelForCausalLM.from_pretrained(model.source.path, config=config, dtype=kind)
    built = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    if load_format != "dummy":
        _load_weights(built, model)
    return built


def _load_weights(built: Any, model: ModelConfig) -> None:
    """From a GGUF file, which Quire's loader gives under the names that transformers uses."""
    from quire.loading.weights import read_weights

    missing, unexpected = built.load_state_dict(read_weights(model.source), strict=False)
    built.tie_weights()
    absent = [name for name in missing if not (model.tie_word_embeddings and "lm_head" in name)]
    if unexpected or absent:
        raise QuireError(
            f"model={model.source.name!r} cannot be compared with transformers, whose tensors "
            f"differ ({', '.join([*unexpected, *absent][:4])}). Use --no-transformers."
        )


def run_static_batches(
    model: Any, requests: Sequence[BenchRequest], batch_size: int, num_slots: int
) -> StaticRun:
    """Generate for all requests, counting what each slot of `num_slots` does at every pass."""
    steps: list[MemoryStep] = []
    tokens: list[list[int]] = []
    started, cpu_started = time.perf_counter(), time.process_time()
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        num_waiting = len(requests) - start - len(batch)
        generated, cache_lens = _generate(model, batch)
        tokens += generated
        steps += [
            _memory_step(batch, index, cache_len, num_slots, num_waiting)
            for index, cache_len in enumerate(cache_lens)
        ]
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return StaticRun(seconds, cpu_s, tokens, steps)


def _memory_step(
    batch: Sequence[BenchRequest], index: int, cache_len: int, num_slots: int, num_waiting: int
) -> MemoryStep:
    """The cache in forward pass `index` of a batch, whose rows are `cache_len` tokens long."""
    width = max(len(request.token_ids) for request in batch)
    running = [request for request in batch if index < request.num_output_tokens]
    slots = Slots(
        used=sum(len(request.token_ids) + index for request in running),
        padding=sum(width - len(request.token_ids) for request in running),
        ended=(len(batch) - len(running)) * cache_len,
        free=num_slots - len(batch) * cache_len,
    )
    return MemoryStep(slots, len(running), num_waiting)


def _generate(model: Any, batch: Sequence[BenchRequest]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each request, and the length of the cache after each forward pass."""
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    width = max(len(request.token_ids) for request in batch)
    rows = [[PAD] * (width - len(one.token_ids)) + one.token_ids for one in batch]
    masks = [[0] * (width - len(one.token_ids)) + [1] * len(one.token_ids) for one in batch]
    wanted = torch.tensor([request.num_output_tokens for request in batch])
    cache_lens: list[int] = []

    def note_cache(module: Any, inputs: Any, outputs: Any) -> None:
        cache_lens.append(outputs.past_key_values.get_seq_length())

    def ended(input_ids: Any, scores: Any, **more: Any) -> Any:
        return input_ids.shape[1] - width >= wanted

    # The model's own settings would fill in what is left unset here, its end token above all.
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, pad_token_id=PAD)
    hook = model.register_forward_hook(note_cache)
    try:
        with torch.inference_mode():
            result = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(masks),
                max_new_tokens=int(wanted.max()),
                stopping_criteria=StoppingCriteriaList([ended]),
            )
    finally:
        hook.remove()
    texts = result[:, width:].tolist()
    return [ids[: one.num_output_tokens] for ids, one in zip(texts, batch, strict=True)], cache_lens
