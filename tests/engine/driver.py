"""`Engine`: the real step loop over the toy executor, driven step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.engine.core import EngineCore
from quire.protocol.adapter import LoRARequest
from quire.protocol.output import FinishedSequence, RequestProgress, StepOutput
from quire.protocol.plan import StepPlan
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from quire.scheduler.scheduler import Pause
from quire.scheduler.sequence import SchedulerLimits, derive_seed
from tests.engine.toy import ToyExecutor, ToyFolders, context_of, next_token

VOCAB = 97
MAX_LEN = 128


class Engine:
    """An `EngineCore` over the toy executor that keeps its plans and checks its outputs."""

    def __init__(self, num_blocks: int = 200, steps_in_flight: int = 1, **limits: Any) -> None:
        block_size, load_polls = limits.pop("block_size", 4), limits.pop("load_polls", 0)
        wanted = {"max_model_len": MAX_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 256}
        self.limits = SchedulerLimits(num_blocks, block_size, **{**wanted, **limits})
        self.toy = ToyExecutor(
            num_blocks,
            block_size,
            VOCAB,
            windows=self.limits.windows,
            num_stages=self.limits.num_stages,
            load_polls=load_polls,
        )
        self.folders = ToyFolders()
        self.core = EngineCore(
            self.toy,
            self.limits,
            steps_in_flight,
            clock=lambda: self.now,
            adapter_reader=self.folders,
        )
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.core.on_plan = self.plans.append
        self.requests: dict[int, NewRequest] = {}
        self.digests: dict[int, str] = {}
        """Of the adapters of requests."""
        self.ended: dict[int, FinishedSequence] = {}
        self.order: list[int] = []
        """Keys in the order in which their requests ended."""

    def add(self, prompt: list[int], max_tokens: int = 4, n: int = 1, **more: Any) -> int:
        """Queue a request; returns its key. `adapter` is the folder of its adapter."""
        key = 100 * len(self.requests)
        if (folder := more.pop("adapter", None)) is not None:
            more["adapter"] = LoRARequest(folder, 1, folder)
            self.digests[key] = self.folders.holds.get(folder, folder)
        params = SamplingParams(n=n, max_tokens=max_tokens, seed=key, ignore_eos=True)
        self.requests[key] = NewRequest(
            key, f"r{key}", np.array(prompt, np.int32), params, arrival_time=0.0, **more
        )
        self.core.add(self.requests[key])
        return key

    def step(self, count: int = 1) -> list[RequestProgress]:
        """Returns the progress reports of the last step."""
        output = StepOutput()
        for _ in range(count):
            num_plans = len(self.plans)
            output = self.core.step()
            for plan in self.plans[num_plans:]:
                assert plan.num_tokens <= self.limits.max_num_batched_tokens
                assert len(plan.rows) <= self.limits.max_num_seqs
                assert (plan.num_new_tokens > 0).all()
            for sequence in output.finished:
                assert sequence.key not in self.ended
                self.ended[sequence.key] = sequence
                self.order.append(sequence.key)
            self.core.scheduler.check_integrity()
        return output.progress

    def run(self) -> None:
        for _ in range(2_000):
            self.step()
            if not self.core.has_work:
                break
        assert not self.core.has_work

    def finish(self) -> None:
        """Run to the end and compare all outputs with what each request would get alone."""
        self.run()
        assert not self.core.scheduler.waiting or self.core.scheduler.pause is not Pause.NONE
        assert self.core.death is None or self.toy.failing_steps, self.core.death
        for key, sequence in self.ended.items():
            request = self.requests[key - key % 100]
            tokens = request.prompt_token_ids.tolist()
            for token in sequence.token_ids.tolist():
                seed = derive_seed(request.params.seed or 0, key % 100)
                adapter = self.digests.get(key - key % 100, "")
                context = context_of(tokens, self.limits.windows, adapter)
                assert token == next_token(context, seed, VOCAB)
                tokens.append(token)
            if sequence.finish_reason == "length":
                assert len(sequence.token_ids) == request.params.max_tokens

    def cached(self, key: int) -> int:
        return self.ended[key].num_cached_tokens


def numbers(count: int, start: int = 0) -> list[int]:
    return [(7 * i + start) % VOCAB for i in range(count)]
