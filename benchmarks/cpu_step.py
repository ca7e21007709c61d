"""Where a decode step on a CPU spends its time, with the embedded model.

    python benchmarks/cpu_step.py
    python benchmarks/cpu_step.py --precisions int8 --batches 1 8 64 --context 512

The phases of a step are timed as the engine runs them, where all layers are one call of the native
library; then the layers are taken one by one to see what linear layers (with their norms and gates)
and attention (with rotation and storing keys and values) take. Medians over steps.

The floor is what reading the weights, and the keys and values of all tokens, takes at the speed at
which this machine, in the same run and with as many threads, adds up numbers that are in order in
large pages. No step with few requests can be faster.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness import markdown_table, say
from profile_step import timed
from quire import LLM, SamplingParams

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "gguf": {"quantization": "gguf"},
    "gguf-a16": {"quantization": "gguf-a16"},
    "gptq": {"load_format": "dummy", "skip_tokenizer_init": True},
}
"""Of the embedded model; GPTQ of 4 bits in groups of 128 has random weights of its sizes."""
WARM_UP_STEPS, ROUNDS, STEPS = 5, 6, 8
READ_BYTES = 512 << 20
Phases = dict[str, tuple[object, str]]


def write_gptq(folder: Path) -> str:
    """The configuration of a checkpoint with the sizes of the embedded model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Reader:
    """Reads memory of the size of a model."""

    def __init__(self) -> None:
        from quire.kernels.cpu.memory import map_bytes, move_to_large_pages

        memory = map_bytes(READ_BYTES)
        self._numbers = memory.view(torch.float32)
        self._numbers.normal_()
        move_to_large_pages(memory)

    def bytes_per_s(self) -> float:
        started = time.perf_counter()
        self._numbers.sum()
        return READ_BYTES / (time.perf_counter() - started)


class Batch:
    """Requests of an engine that all decode."""

    def __init__(self, llm: LLM, size: int, context: int) -> None:
        dice = random.Random(0)
        self.llm, self.size = llm, size
        self._last: StepPlan | None = None
        prompts = [
            {"prompt_token_ids": [dice.randint(1000, 40000) for _ in range(context)]}
            for _ in range(size)
        ]
        room = 2 * ROUNDS * (STEPS + 1) + WARM_UP_STEPS + 200
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=room, detokenize=False)
        llm._core.on_plan = self._note
        llm.enqueue(prompts, params)
        while not self._all_decode():
            llm._loop.step()
        for _ in range(WARM_UP_STEPS):
            llm._loop.step()

    def _note(self, plan: StepPlan) -> None:
        self._last = plan

    def _all_decode(self) -> bool:
        plan = self._last
        return plan is not None and plan.num_tokens == len(plan.rows) == self.size

    def run(self, phases: Phases) -> dict[str, float]:
        """Milliseconds per step of each phase, and of the whole."""
        all_phases = {**phases, "step": (self.llm._loop, "step")}
        seconds = dict.fromkeys(all_phases, 0.0)
        self.llm._loop.step()
        with timed(all_phases, seconds):
            for _ in range(STEPS):
                self.llm._loop.step()
        assert self._all_decode(), "a request ended"
        return {name: 1e3 * value / STEPS for name, value in seconds.items()}

    def finish(self) -> None:
        self.llm._core.on_plan = None
        for request in self.llm._enqueued:
            self.llm._core.abort(request.engine_id)
        self.llm.wait_for_completion(use_tqdm=False)


def engine_phases(llm: LLM) -> Phases:
    from quire.layers.attention.cpu import CpuStep

    core: Any = llm._core
    return {
        "schedule and apply": (core.scheduler, "schedule"),
        "apply": (core.scheduler, "apply"),
        "forward": (core.executor, "execute"),
        "layers": (CpuStep, "decode"),
        "logits": (core.executor.runner.model, "logits"),
        "choose tokens": (core.executor, "sample"),
    }


def layer_phases() -> Phases:
    from quire.layers.attention.cpu import CpuStep
    from quire.layers.quantization.packed import Packed

    return {
        "linear after norm": (Packed, "apply_after_norm"),
        "linear": (Packed, "apply"),
        "attention": (CpuStep, "attend"),
    }


def bytes_read(llm: LLM, size: int, context: int) -> float:
    """By a step in the middle of those that are timed."""
    from quire.models.loader import held_weight_bytes

    core: Any = llm._core
    runner = core.executor.runner
    layout = runner.kv.layout
    tokens = context + WARM_UP_STEPS + ROUNDS * (STEPS + 1)
    kv_bytes: float = size * tokens * layout.bytes_per_block / layout.block_size
    return held_weight_bytes(runner.model) + kv_bytes


def profile_batch(llm: LLM, reader: Reader, size: int, context: int) -> dict[str, float]:
    """Milliseconds by row of the table."""
    core: Any = llm._core
    decoder = core.executor.runner.model.model.layers
    runs = decoder.runs
    one_by_one = [replace(run, decoder=None) for run in runs]
    assert all(run.decoder for run in runs), "the native library is not there"
    batch = Batch(llm, size, context)
    whole: list[dict[str, float]] = []
    pieces: list[dict[str, float]] = []
    speeds: list[float] = []
    for _ in range(ROUNDS):
        speeds.append(reader.bytes_per_s())
        decoder.__dict__["runs"] = runs
        whole.append(batch.run(engine_phases(llm)))
        decoder.__dict__["runs"] = one_by_one
        pieces.append(batch.run(layer_phases()))
    decoder.__dict__["runs"] = runs
    batch.finish()

    def median(runs: list[dict[str, float]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    logits = median(whole, "logits")
    host = median(whole, "schedule and apply") + median(whole, "apply")
    rows = {
        "all layers, one call": median(whole, "layers"),
        "inputs of the step, embedding, last norm": median(whole, "forward")
        - median(whole, "layers")
        - logits,
        "logits": logits,
        "choose and keep tokens": median(whole, "choose tokens"),
        "schedule, apply": host,
        "step": median(whole, "step"),
        "one by one: linear layers": median(pieces, "linear after norm")
        + median(pieces, "linear")
        - logits,
        "one by one: attention": median(pieces, "attention"),
        "one by one: step": median(pieces, "step"),
    }
    rows["the rest: outputs, loop"] = rows["step"] - sum(list(rows.values())[:5])
    speed = statistics.median(speeds)
    rows["floor: reading weights, keys and values"] = 1e3 * bytes_read(llm, size, context) / speed
    rows["GB/s that memory is read at"] = speed / 1e9
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens in before the first step")
    arguments = parser.parse_args(words)
    figures: dict[str, dict[str, float]] = {}
    reader = Reader()
    for precision in arguments.precisions:
        options = PRECISIONS[precision]
        with tempfile.TemporaryDirectory() as folder:
            if precision == "gptq":
                options = {**options, "model": write_gptq(Path(folder))}
            llm = LLM(max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False, **options)
        for size in arguments.batches:
            figures[f"{precision}, {size}"] = profile_batch(llm, reader, size, arguments.context)
        del llm
    names = list(next(iter(figures.values())))
    table = [[name, *(f"{figures[one][name]:.2f}" for one in figures)] for name in names]
    say(markdown_table(["ms", *figures], table))


if __name__ == "__main__":
    main()
