"""The sampler on a GPU: the CPU's tokens, and never a wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.protocol.sampling import SamplingParams
from tests.decoding import reference
from tests.decoding.table import Sketch, Table, random_logits
from tests.decoding.test_random import chi_square, chi_square_bound
from tests.decoding.test_sampler import FEATURES

VOCAB = 5000
pytestmark = pytest.mark.gpu


def requests() -> list[Sketch]:
    return [
        Sketch(params.clone(), [6, 7, i, 2, 30], seed=i << 33 | 5, stop_token_ids=(0, 3, i))
        for i, params in enumerate(FEATURES.values())
    ]


def test_gpu_chooses_like_the_cpu_and_does_not_wait():
    tables = {"cpu": Table(VOCAB, max_rows=50), "cuda": Table(VOCAB, max_rows=50, device="cuda")}
    rows = [2 * i + 1 for i in range(len(requests()))]
    for table in tables.values():
        for row, request in zip(rows, requests(), strict=True):
            table.add(row, request, num_logprobs=row % 4 - 1)
    host_rows = np.array(rows, np.int32)
    for step in range(10):
        logits = torch.from_numpy(random_logits(step, len(rows), VOCAB))
        got = {}
        for device, table in tables.items():
            inputs = (logits.to(device), torch.tensor(rows, device=device), host_rows)
            torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
            try:
                got[device] = table.sampler.sample(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            table.append(rows, got[device].tokens)
        assert got["cuda"].tokens.tolist() == got["cpu"].tokens.tolist()
        cuda, cpu = (got[device].logprobs.to_host() for device in ("cuda", "cpu"))
        assert np.array_equal(cuda.token_ids, cpu.token_ids)
        assert np.array_equal(cuda.ranks, cpu.ranks)
        np.testing.assert_allclose(cuda.logprobs, cpu.logprobs, atol=1e-5)
        if step == 4:
            for table in tables.values():
                table.sampler.remove(rows[-1])
                table.add(rows[-1], Sketch(FEATURES["all_filters"].clone(), [9], seed=77))


def test_gpu_verifies_drafts_like_the_cpu_and_does_not_wait():
    """Every request has four lines, with drafts that repeat each other and known tokens."""
    rows = [2 * i + 1 for i in range(len(requests()))]
    line_rows = np.repeat(np.array(rows, np.int32), 4)
    logits = torch.from_numpy(random_logits(5, len(line_rows), VOCAB))
    logits[:, [7, 30]] += 5.0
    got = {}
    for device in ("cpu", "cuda"):
        table = Table(VOCAB, max_rows=50, device=device)
        for row, request in zip(rows, requests(), strict=True):
            table.add(row, request, num_logprobs=row % 4 - 1)
            table.draft(row, [7, 7, 30])
        offsets = torch.arange(4, dtype=torch.int32, device=device).repeat(len(rows))
        inputs = (logits.to(device), torch.from_numpy(line_rows).to(device), line_rows)
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            sampled = table.sampler.sample(*inputs, offsets=offsets)
            table.sampler.appended(inputs[1], sampled.tokens, offsets < 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after = table.sample(logits[::4], rows).tokens.tolist()
        got[device] = sampled.tokens.tolist(), sampled.logprobs.to_host(), after
    assert got["cuda"][0] == got["cpu"][0] and got["cuda"][2] == got["cpu"][2]
    assert np.array_equal(got["cuda"][1].token_ids, got["cpu"][1].token_ids)
    np.testing.assert_allclose(got["cuda"][1].logprobs, got["cpu"][1].logprobs, atol=1e-5)


def test_a_line_is_chosen_alike_alone_and_in_a_batch():
    """Whatever shares the batch, whichever line and row it has, and after warming up."""
    table = Table(VOCAB, max_rows=300, device="cuda")
    table.sampler.warm_up(torch.bfloat16)
    params = list(FEATURES.values())
    rows = list(range(299, -1, -1))
    for row in rows:
        request = Sketch(params[row % len(params)].clone(), [row, 7, 2], seed=row // 7)
        table.add(row, request)
    logits = torch.from_numpy(random_logits(11, len(rows), VOCAB)).to("cuda", torch.bfloat16)
    together = table.sample(logits, rows).tokens.tolist()
    for line in range(0, 300, 13):
        assert table.sample(logits[line : line + 1], [rows[line]]).tokens.tolist() == [
            together[line]
        ]
    assert table.sample(logits[50:250], rows[50:250]).tokens.tolist() == together[50:250]


@pytest.mark.parametrize(
    "filters", [{"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.05}], ids=str
)
def test_tokens_follow_their_probabilities(filters):
    vocab, count = 50, 20_000
    line = random_logits(4, vocab, spread=1.0)
    table = Table(vocab, max_rows=count, device="cuda")
    for row in range(count):
        table.add(row, Sketch(SamplingParams(**filters), [1], seed=row))
    logits = torch.from_numpy(line).repeat(count, 1)
    tokens = table.sample(logits, list(range(count))).tokens.cpu().numpy()
    counts = np.bincount(tokens, minlength=vocab)
    made = SamplingParams(**filters)
    tempered = line / np.float32(made.temperature)
    kept = sorted(reference.kept_tokens(tempered, made.top_k, made.top_p, made.min_p))
    probs = np.exp(tempered[kept].astype(np.float64))
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], count * probs / probs.sum()) < chi_square_bound(len(kept) - 1)
