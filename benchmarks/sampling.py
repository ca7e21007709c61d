"""Times `Sampler.sample` on a GPU: `python benchmarks/sampling.py`.

GPU time is that of the launches in a CUDA graph, with logits that do not stay in the L2 cache; host
time is what a call takes until it returns.
"""

from __future__ import annotations

import argparse
import time
from itertools import cycle

import numpy as np
import torch

from harness import require_gpu
from quire.decoding.sampler import Sampler
from quire.protocol.plan import AddedRow
from quire.protocol.sampling import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 50": SamplingParams(top_k=50),
    "k 50, p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
}
CACHE_BYTES = 100e6


def make_sampler(batch: int, vocab: int, params: SamplingParams) -> Sampler:
    """A sampler with `batch` equal requests of 500 tokens."""
    token_ids = torch.randint(vocab, (batch, 512), dtype=torch.int32, device="cuda")
    num_tokens = torch.full((batch,), 500, dtype=torch.int32, device="cuda")
    sampler = Sampler(vocab, batch, "cuda", token_ids, num_tokens)
    known = token_ids[:, :500].cpu().numpy()
    for row in range(batch):
        added = AddedRow(
            row,
            known[row],
            num_prompt_tokens=250,
            num_computed_tokens=0,
            params=params,
            seed=row,
            stop_token_ids=(),
            num_logprobs=-1,
            num_prompt_logprobs=-1,
        )
        sampler.add(added, known[row])
    return sampler


def measure(batch: int, vocab: int, params: SamplingParams, spread: float) -> tuple[float, float]:
    """Microseconds on the GPU and on the host."""
    from triton.testing import do_bench_cudagraph

    sampler = make_sampler(batch, vocab, params)
    host_rows = np.arange(batch, dtype=np.int32)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    copies = max(2, min(64, int(CACHE_BYTES / (batch * vocab * 2))))
    logits = [(torch.randn(batch, vocab, device="cuda") * spread).bfloat16() for _ in range(copies)]
    turn = cycle(logits)

    def step() -> None:
        sampler.sample(next(turn), rows, host_rows)

    with torch.inference_mode():
        step()
        torch.cuda.synchronize()
        on_gpu = do_bench_cudagraph(step, rep=20) * 1e3
        calls = 50 if batch <= 32 else 10
        started = time.perf_counter()
        for _ in range(calls):
            step()
        on_host = (time.perf_counter() - started) / calls * 1e6
        torch.cuda.synchronize()
    return on_gpu, on_host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256, 151936])
    parser.add_argument("--spread", type=float, default=2.0, help="of the random logits")
    args = parser.parse_args()
    require_gpu()
    print("GPU us / host us".ljust(18), *(name.rjust(17) for name in KINDS))
    for vocab in args.vocab:
        for batch in args.batch:
            cells = []
            for params in KINDS.values():
                on_gpu, on_host = measure(batch, vocab, params, args.spread)
                cells.append(f"{on_gpu:.1f} / {on_host:.0f}".rjust(17))
                torch.cuda.empty_cache()
            print(f"{batch} x {vocab}".ljust(18), *cells, flush=True)


if __name__ == "__main__":
    main()
