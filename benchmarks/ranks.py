"""What ranks in processes of their own cost a step: a toy model, many requests, one rank and two.

    python benchmarks/ranks.py --requests 1024 --turns 40

The model has next to no arithmetic, so that a step is the host's work and the way of plans and
results. All engines run at the same time and take turns of a few decode steps each; the medians of
turns that follow each other are compared. A second table says where the time of a step goes between
the engine and its ranks, by time stamps of both. A machine with free cores is needed: every rank
and the engine keep one busy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire.engine.executors import launch

STAMPS = "QUIRE_BENCHMARK_STAMPS"
"""The folder where ranks leave their time stamps."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ENGINES: dict[str, dict[str, Any]] = {
    "one rank, in this process": {},
    "one rank, in another": {"distributed_executor_backend": "mp"},
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two stages of a layer each": {
        "pipeline_parallel_size": 2,
        "hf_overrides": {"num_hidden_layers": 2},
    },
}
NAME = Path(__file__).stem
NUM_WARM = 3
"""Turns that do not count."""
NUM_COLD = 4
"""Steps at the beginning of a turn that do not count: prompts, and what the turns of other engines
have driven out of the caches."""

# --- time stamps ------------------------------------------------------------------------------

Stamps = dict[str, dict[int, float]]
"""Seconds of the clock that all processes share, by name and step."""
SPANS = (
    ("engine: plan encoded and sent", "execute", "executed"),
    ("until the first rank has it", "executed", "rank: plan"),
    ("rank: forward pass", "rank: plan", "rank: forward"),
    ("rank: until it may sample", "rank: forward", "rank: sample"),
    ("rank: sampling", "rank: sample", "rank: sampled"),
    ("rank: result encoded and sent", "rank: sampled", "rank: sent"),
    ("until the engine has it", "rank: sent", "result"),
    ("all that an executor does", "execute", "result"),
)


def stamp(stamps: Stamps, name: str, step: int) -> None:
    stamps.setdefault(name, {})[step] = time.perf_counter()


def watch_executor(executor: Any) -> Stamps:
    """Of one executor in this process."""
    stamps: Stamps = {}
    execute, sample = executor.execute, executor.sample

    def watched_execute(plan: Any) -> None:
        stamp(stamps, "execute", plan.step)
        execute(plan)
        stamp(stamps, "executed", plan.step)

    def watched_sample(step: int, masks: Any = None) -> Any:
        pending = sample(step, masks)
        get = pending.result

        class Watched:
            def result(self) -> Any:
                found = get()
                stamp(stamps, "result", step)
                return found

        return Watched()

    executor.execute, executor.sample = watched_execute, watched_sample
    return stamps


def watch_rank() -> None:
    """Called in the process of a rank, before it begins."""
    from quire.engine.executors.rank import RankLoop
    from quire.kernels.cpu.collectives import SharedMemoryGroup
    from quire.protocol.ranks import Execute, Sample, Sampled

    stamps: Stamps = {}
    loop: Any = RankLoop
    seconds = 0.0

    def watched_collective(call: Any) -> Any:
        def collective(*arguments: Any) -> Any:
            nonlocal seconds
            before = time.perf_counter()
            found = call(*arguments)
            seconds += time.perf_counter() - before
            return found

        return collective

    for name in ("all_reduce", "all_gather", "broadcast"):
        setattr(SharedMemoryGroup, name, watched_collective(getattr(SharedMemoryGroup, name)))
    obey, answer, run = loop._obey, loop._answer, loop.run

    def watched_obey(self: Any, order: Any) -> None:
        nonlocal seconds
        if isinstance(order, Execute):
            seconds = 0.0
            stamp(stamps, "rank: plan", order.plan.step)
            obey(self, order)
            stamp(stamps, "rank: forward", order.plan.step)
            return
        if isinstance(order, Sample):
            stamp(stamps, "rank: sample", order.step)
        obey(self, order)

    def watched_answer(self: Any, reply: Any) -> None:
        if isinstance(reply, Sampled):
            stamp(stamps, "rank: sampled", reply.result.step)
            stamps.setdefault("rank: collectives", {})[reply.result.step] = seconds
        answer(self, reply)
        if isinstance(reply, Sampled):
            stamp(stamps, "rank: sent", reply.result.step)

    is_written, leave = threading.Event(), os._exit

    def watched_run(self: Any) -> int:
        try:
            return int(run(self))
        finally:
            file = Path(os.environ[STAMPS]) / f"{os.getpid()}.json"
            if "rank: sent" in stamps:
                file.write_text(json.dumps(stamps), encoding="utf-8")
            is_written.set()

    def watched_exit(code: int) -> None:
        is_written.wait(1)  # the thread of the heartbeat may see the end first
        leave(code)

    os._exit = watched_exit  # type: ignore[assignment]
    loop._obey, loop._answer, loop.run = watched_obey, watched_answer, watched_run


# --- engines ----------------------------------------------------------------------------------


class Turns:
    """One engine, and what its turns took."""

    def __init__(
        self, folder: Path, num_requests: int, steps_in_flight: int | None, changes: dict[str, Any]
    ) -> None:
        from quire import LLM

        self.num_stages = changes.get("pipeline_parallel_size", 1)
        is_alone = not changes or self.num_stages > 1
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            num_threads=changes.get("tensor_parallel_size", 1) * self.num_stages,
            max_model_len=64,
            max_num_seqs=num_requests,
            max_num_batched_tokens=8192,
            block_size=32,  # all tokens of a request
            num_gpu_blocks_override=2 * num_requests,
            enable_prefix_caching=False,
            max_steps_in_flight=None if is_alone else steps_in_flight,
            **changes,
        )
        self._core: Any = self.llm._core
        self._num_requests = num_requests
        self.milliseconds: list[float] = []
        """Median of each turn's steps, in which each request gets a token."""
        self.stamps = watch_executor(self._core.executor)

    def take(self, num_steps: int) -> None:
        """All requests decode together for so many steps."""
        from quire import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=NUM_COLD + num_steps, ignore_eos=True)
        prompts: Any = [
            {"prompt_token_ids": [1 + i % 200, 2 + i // 200]} for i in range(self._num_requests)
        ]
        ends: list[float] = []
        step = self._core.step

        def timed() -> Any:
            output = step()
            ends.append(time.perf_counter())
            return output

        self._core.step = timed
        self.llm.generate(prompts, params, use_tqdm=False)
        del self._core.step
        # The last steps have ends of requests in them.
        counted = np.array(ends[NUM_COLD * self.num_stages : -2 * self.num_stages])
        took = counted[self.num_stages :] - counted[: -self.num_stages]
        self.milliseconds.append(1e3 * float(np.median(took)))

    def read_stamps(self, folder: Path) -> Stamps:
        """With those of the rank that answers, if that is another process, once it has ended."""
        found = dict(self.stamps)
        for hello in getattr(self._core.executor, "_hellos", {}).values():
            file = folder / f"{hello.pid}.json"
            if file.exists():
                for name, values in json.loads(file.read_text(encoding="utf-8")).items():
                    found[name] = {int(step): value for step, value in values.items()}
        return found


def quartiles(values: Any) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:6.3f} ({low:.3f} to {high:.3f})"


def median_bounds(values: Any) -> str:
    """Between which the median lies in 19 of 20 cases."""
    middle, apart = len(values) / 2, 0.98 * len(values) ** 0.5
    low, high = np.sort(values)[
        [max(int(middle - apart), 0), int(min(middle + apart, middle * 2 - 1))]
    ]
    return f"{low:.3f} to {high:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=24, help="of a turn")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--engines", help="some of them, by number", default="0123")
    parser.add_argument("--steps-in-flight", type=int, help="of tensor-parallel ranks")
    arguments = parser.parse_args()
    names = [name for i, name in enumerate(ENGINES) if str(i) in arguments.engines]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ[STAMPS] = place
        launch.PROGRAM = launch.PROGRAM.replace("from", f"import {NAME}; {NAME}.watch_rank(); from")
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        engines = {
            name: Turns(folder, arguments.requests, arguments.steps_in_flight, ENGINES[name])
            for name in names
        }
        for _ in range(NUM_WARM + arguments.turns):
            for one in engines.values():
                one.take(arguments.steps)
        for one in engines.values():
            one.llm.shutdown()
        stamps = {name: one.read_stamps(folder) for name, one in engines.items()}
    print(
        f"{arguments.requests} requests, {arguments.turns} turns of {arguments.steps} steps; "
        "ms of a step: median (quartiles)"
    )
    first = np.array(engines[names[0]].milliseconds[NUM_WARM:])
    for name, one in engines.items():
        found = np.array(one.milliseconds[NUM_WARM:])
        more = found - first
        print(
            f"{name:28}{quartiles(found):28} more: {quartiles(more):28} its median is "
            f"{median_bounds(more)}"
        )
    for name, times in stamps.items():
        print(f"{name}:")
        report(times)
    return 0


def report(stamps: Stamps) -> None:
    for label, begin, end in SPANS:
        steps = sorted(set(stamps.get(begin, ())) & set(stamps.get(end, ())))
        took = [1e3 * (stamps[end][step] - stamps[begin][step]) for step in steps]
        if took:
            print(f"  {label:36}{quartiles(took[len(took) // 4 :])}")
    inside = list(stamps.get("rank: collectives", {}).values())
    if any(inside):
        print(f"  {'rank: of it in collectives':36}{quartiles(np.multiply(1e3, inside))}")


if __name__ == "__main__":
    sys.exit(main())
