"""Speculation on a GPU, by a drafter whose drafts are right as often as it is told: what a step
costs that verifies drafts, what accepted drafts bring, and what `auto` loses where none are.

    python benchmarks/gpu_speculation.py                       # llama-8b; about three minutes
    python benchmarks/gpu_speculation.py --batches 1 --drafts 7 --json speculation.json

Weights are random, so what is sampled is replaced by a text that the drafter knows: all other work
is done as ever, the n-gram search too. One engine takes turns with drafts and without, and figures
are medians of ratios of turns that follow each other.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import SHAPES, markdown_table, require_gpu, say, start_engine, write_json
from quire import SamplingParams
from quire.config.speculative import SpeculativeConfig
from quire.scheduler.speculation import Speculation

if TYPE_CHECKING:
    from torch import Tensor

    from quire import LLM
    from quire.decoding.sampler import Sampled
    from quire.decoding.speculative.drafter import Drafter
    from quire.protocol.plan import StepPlan

CONTEXT = 1000
MAX_LEN = 2048
WARM_UP_STEPS, TIMED_STEPS, PROFILED_STEPS = 8, 32, 8
AUTO_STEPS = 200
"""Of a turn: what `auto` tries now and then must be among them."""
STREAM_TOKENS = 600
NGRAMS = (3, 12)
MOST = {(1, 4): 1.12, (64, 3): 1.45, (64, 4): 1.65}
"""Targets for a step with so many rows and drafts, as a multiple of one without drafts."""
MOST_VERIFIED = 64
LEAST_SPEED = 2.9
"""With four drafts, of which each is right in four of five cases."""
LEAST_AUTO = 0.99


class Script:
    """The text of all rows, told by position, and which drafts of it are wrong."""

    def __init__(self, llm: LLM, acceptance: float, vocab_size: int) -> None:
        import torch

        dice = random.Random(1)
        executor: Any = llm._core.executor
        runner = executor.runner
        device, length = runner.table.device, runner.table.token_ids.shape[1] + 1
        text = [dice.randint(1000, vocab_size - 2) for _ in range(length)]
        drafts = [token + (dice.random() >= acceptance) for token in text]
        self._text = torch.tensor(text, dtype=torch.int32, device=device)
        self._drafts = torch.tensor(drafts, dtype=torch.int32, device=device)
        self._table = runner.table

    def sampled(self, rows: Tensor, offsets: Tensor | None) -> Tensor:
        """In place of what was sampled in lines of these rows."""
        places = self._table.num_tokens.index_select(0, rows)
        return self._text.index_select(0, places if offsets is None else places + offsets)

    def drafts(self, rows: Tensor, count: int) -> Tensor:
        import torch

        places = self._table.num_tokens.index_select(0, rows)[:, None]
        places = places + torch.arange(count, dtype=torch.int32, device=rows.device)
        places = places.clamp_max(len(self._drafts) - 1)
        return self._drafts.index_select(0, places.view(-1)).view(places.shape)


class ToldDrafter:
    """Searches as the drafter of the text does, and proposes what its script says instead."""

    def __init__(self, searching: Drafter, script: Script, num_drafts: int) -> None:
        self._searching, self._script, self._num_drafts = searching, script, num_drafts

    def settle(self, plan: StepPlan) -> None:
        self._searching.settle(plan)

    def update(self, plan: StepPlan) -> None:
        self._searching.update(plan)

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        self._searching.accepted(rows, counts)

    def propose(self, rows: Tensor) -> Tensor:
        self._searching.propose(rows)
        return self._script.drafts(rows, self._num_drafts)


@dataclass
class Mode:
    """A way to decode; `auto` keeps what it has learnt from turn to turn."""

    name: str
    speculation: Speculation
    drafter: Drafter | None


class Modes:
    """The ways to decode of one engine, one at a time; it must be at rest in between."""

    def __init__(self, llm: LLM, vocab_size: int) -> None:
        self.llm, self._vocab_size = llm, vocab_size
        executor: Any = llm._core.executor
        self._runner = executor.runner
        self._searching = self._runner.drafter
        self._sample = self._runner._sample
        assert self._searching is not None

    def _speculation(self, method: str | None, num_drafts: int) -> Speculation:
        columns = self.llm._core.scheduler.columns
        if method is None:
            return Speculation(columns)
        return Speculation(columns, SpeculativeConfig(method, num_drafts, *NGRAMS))

    def plain(self) -> Mode:
        return Mode("none", self._speculation(None, 0), None)

    def told(self, method: str, num_drafts: int, acceptance: float) -> Mode:
        drafter = ToldDrafter(
            self._searching, Script(self.llm, acceptance, self._vocab_size), num_drafts
        )
        name = f"{method}, {num_drafts} drafts, {acceptance:.0%} right"
        return Mode(name, self._speculation(method, num_drafts), drafter)

    def searching(self, num_drafts: int) -> Mode:
        """`auto` as it is; a text without repetitions has no drafts."""
        return Mode("auto, no drafts", self._speculation("auto", num_drafts), self._searching)

    def use(self, mode: Mode) -> None:
        assert not self.llm._core.has_work, "a mode begins with the engine at rest"
        script = Script(self.llm, 1.0, self._vocab_size)
        sample: Callable[..., Sampled] = self._sample

        def told(
            logits: Tensor, rows: Tensor, host_rows: Any, masks: Any, offsets: Any = None
        ) -> Sampled:
            sampled = sample(logits, rows, host_rows, masks, offsets)
            sampled.tokens.copy_(script.sampled(rows, offsets))
            return sampled

        self._runner._sample = told
        self._runner.drafter = mode.drafter
        self.llm._core.scheduler.speculation = mode.speculation


class Rows:
    """Requests that all decode, in one mode."""

    def __init__(self, llm: LLM, size: int, max_tokens: int) -> None:
        self.llm, self.size = llm, size
        self._plan: StepPlan | None = None
        prompts = []
        for number in range(size):
            dice = random.Random(number)
            tokens = [dice.randint(1000, 40000) for _ in range(CONTEXT)]
            prompts.append({"prompt_token_ids": tokens})
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
        )
        llm.enqueue(prompts, params)  # prompts are found in the cache from the second time on
        llm._core.on_plan = self._note
        while not self.all_decode:
            llm._loop.step()

    def _note(self, plan: StepPlan) -> None:
        self._plan = plan

    @property
    def all_decode(self) -> bool:
        plan = self._plan
        if plan is None or len(plan.rows) != self.size:
            return False
        return bool((plan.num_new_tokens == plan.num_samples).all())

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds and tokens per step."""
        import torch

        metrics = self.llm._core.metrics
        torch.cuda.synchronize()
        before, started = metrics.generation_tokens.value, time.perf_counter()
        for _ in range(steps):
            self.llm._loop.step()
            assert self.all_decode, "a request ended: raise MAX_LEN"
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return seconds / steps, (metrics.generation_tokens.value - before) / steps

    def launches(self) -> dict[str, float]:
        """Kernels and copies of a step outside of graphs, and all of them, on the device."""
        from torch.profiler import ProfilerActivity, profile

        with profile(
            activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True
        ) as profiler:
            self.run(PROFILED_STEPS)
        found = {"launched": 0.0, "on the device": 0.0}
        for event in profiler.key_averages():
            if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync")):
                found["launched"] += event.count / PROFILED_STEPS
            if event.self_device_time_total and not event.key.startswith("cu"):
                found["on the device"] += event.count / PROFILED_STEPS
        return found

    def finish(self) -> None:
        self.llm._core.on_plan = None
        for request in self.llm._enqueued:
            self.llm._core.abort(request.engine_id)
        self.llm.wait_for_completion(use_tqdm=False)


def in_turns(
    modes: Modes, ways: Sequence[Mode], size: int, steps: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds and tokens per step of each way, round by round; the first round warms up."""
    found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for number in range(1 + rounds):
        for way in ways:
            modes.use(way)
            rows = Rows(modes.llm, size, MAX_LEN - CONTEXT)
            rows.run(WARM_UP_STEPS)
            figures = rows.run(steps)
            rows.finish()
            if number:
                found[way.name].append(figures)
    return found


def ratios(
    found: dict[str, list[tuple[float, float]]], of: Callable[[tuple[float, float]], float]
) -> dict[str, tuple[float, float, float]]:
    """Least, median and most of each way over the first one in the same round."""
    first, *others = found
    made = {}
    for name in others:
        each = [of(x) / of(y) for x, y in zip(found[name], found[first], strict=True)]
        made[name] = min(each), statistics.median(each), max(each)
    return made


def speed(figures: tuple[float, float]) -> float:
    seconds, tokens = figures
    return tokens / seconds


def table(rows: list[list[str]]) -> None:
    say(markdown_table(("rows", "drafts", "measured", "least to most", "target"), rows) + "\n")


def spread(figures: tuple[float, float, float]) -> list[str]:
    least, median, most = figures
    return [f"{median:.3f} x", f"{least:.3f} to {most:.3f}"]


def verification(modes: Modes, size: int, num_drafts: int, rounds: int) -> dict[str, Any]:
    """Steps in which all drafts are wrong, so that rows grow as without."""
    ways = [modes.plain()]
    ways += [modes.told("ngram", count, 0.0) for count in sorted({1, 2, 3, num_drafts})]
    found = in_turns(modes, ways, size, TIMED_STEPS, rounds)
    rows, figures = [], ratios(found, lambda step: step[0])
    plain_ms = 1e3 * statistics.median(seconds for seconds, _ in found["none"])
    for way in ways[1:]:
        goal = MOST.get((size, way.speculation.num_drafts))
        wanted = "" if goal is None else f"at most {goal} x"
        rows.append([str(size), way.name, *spread(figures[way.name]), wanted])
    say(f"Time of a step that verifies drafts; without it takes {plain_ms:.3f} ms\n")
    table(rows)
    return {"plain_ms": plain_ms, **figures}


def stream(modes: Modes, num_drafts: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of one request whose drafts are right in four of five cases."""
    ways = [modes.plain()]
    ways += [modes.told(method, num_drafts, 0.8) for method in ("ngram", "auto")]
    found = in_turns(modes, ways, 1, STREAM_TOKENS // (1 + num_drafts), rounds)
    figures = ratios(found, speed)
    rows = [["1", way.name, *spread(figures[way.name]), f"{LEAST_SPEED} x"] for way in ways[1:]]
    for way, row in zip(ways[1:], rows, strict=True):
        row[1] += f": {statistics.mean(tokens for _, tokens in found[way.name]):.2f} tokens a step"
    say("Speed of one stream\n")
    table(rows)
    return dict(figures)


def losses(modes: Modes, size: int, num_drafts: int, rounds: int) -> dict[str, Any]:
    """Tokens per second where drafts are always wrong, and where there are none."""
    ways = [modes.plain(), modes.told("auto", num_drafts, 0.0), modes.searching(num_drafts)]
    found = in_turns(modes, ways, size, AUTO_STEPS, rounds)
    figures = ratios(found, speed)
    rows = [
        [str(size), way.name, *spread(figures[way.name]), f"at least {LEAST_AUTO} x"]
        for way in ways[1:]
    ]
    say("Speed with `auto` where drafts bring nothing\n")
    table(rows)
    counted = {}
    for way in (ways[0], ways[2]):
        modes.use(way)
        batch = Rows(modes.llm, size, MAX_LEN - CONTEXT)
        batch.run(WARM_UP_STEPS)
        counted[way.name] = batch.launches()
        batch.finish()
        kinds = ", ".join(f"{count:.0f} {kind}" for kind, count in counted[way.name].items())
        say(f"Kernels and copies of a step of {size}, {way.name}: {kinds}")
    say("")
    return {**figures, "launches": counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpu()
    config = {"method": "auto", "num_speculative_tokens": args.drafts}
    started = time.perf_counter()
    llm = start_engine(
        args.model, speculative_config=config, max_model_len=MAX_LEN, max_num_seqs=256
    )
    seconds = time.perf_counter() - started
    say(f"{args.model}, {CONTEXT} tokens of context; started in {seconds:.1f} s\n")
    figures: dict[str, Any] = {}
    with llm:
        modes = Modes(llm, SHAPES[args.model].vocab)
        if 1 in args.batches:
            figures["stream"] = stream(modes, args.drafts, args.rounds)
        for size in args.batches:
            figures[f"losses, {size}"] = losses(modes, size, args.drafts, args.rounds)
            if size <= MOST_VERIFIED:
                figures[f"verification, {size}"] = verification(
                    modes, size, args.drafts, args.rounds
                )
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
