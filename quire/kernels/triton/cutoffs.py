"""Cutoffs of top_k, top_p and min_p without a sort.

What is kept depends on the weight above a logit: the number of higher logits for top_k, their mass
for top_p. The cutoff is the lowest logit with little enough above it. It is found by narrowing a
bracket, each step a launch whose programs have one chunk of one line each:

1. the highest and the lowest logit of the chunk;
2. twice: the weight above each of 16 pivots spread over the bracket, which leaves 1/16 of it;
3. the logits inside of the bracket are collected, and the mass above it is summed exactly;
4. one program per line searches the collected logits. Where they are too many, or where rounding
   in step 2 misled it, it searches the whole line instead.

Chunks do not depend on the batch, so neither does any result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch.sampling import Kinds, RowSettings
from quire.kernels.triton.cutoff_search import (
    divide,
    find_cutoff,
    mass_of,
    to_key,
    weight_above,
)

CHUNK = 4096
NUM_WARPS = 4
MAX_COLLECTED = 8192
TILE = 4096
NUM_ROUNDS = tl.constexpr(2)
NUM_PIVOTS = tl.constexpr(16)

# What a line's notes hold: its settings, then one number per chunk for each of the extremes, and
# for each pivot of each round.
NUM_SETTINGS = tl.constexpr(4)
NUM_SUMS = tl.constexpr(34)


@triton.jit
def _load_settings(notes):
    """(temperature, top_k, top_p, log_min_p)"""
    return tl.load(notes), tl.load(notes + 1), tl.load(notes + 2), tl.load(notes + 3)


@triton.jit
def _load_logits(logits_ptr, line, stride, vocab_size, CHUNK: tl.constexpr):
    tokens = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + line * stride + tokens, tokens < vocab_size, float("-inf"))
    return x.to(tl.float32)


@triton.jit
def _load_extremes(notes, splits, SPLITS: tl.constexpr):
    """The highest and the lowest logit of the line, minus infinity aside."""
    part = tl.arange(0, SPLITS)
    at = notes + NUM_SETTINGS + part
    top = tl.max(tl.load(at, part < splits, float("-inf")), 0)
    bottom = tl.min(tl.load(at + SPLITS, part < splits, float("inf")), 0)
    return top, bottom


@triton.jit
def _narrow(
    notes,
    top,
    bottom,
    temperature,
    top_k,
    top_p,
    splits,
    SPLITS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """The bracket [low, high) of the cutoff after so many rounds, before temperature."""
    # Logits 32 below the highest one, once divided by the temperature, have hardly any mass.
    low = tl.maximum(bottom, top - 32.0 * tl.where(top_k > 0, 1.0, temperature))
    high = tl.full([], float("inf"), tl.float32)
    wanted = top_k
    # Counts are exact; this bounds the relative error of rounded sums of masses.
    slack = tl.where(top_k > 0, 0.0, 1e-5)
    pivot = tl.arange(0, NUM_PIVOTS)
    part = tl.arange(0, SPLITS)
    for done in tl.static_range(ROUNDS):
        first, last = tl.maximum(low, bottom), tl.minimum(high, top)
        pivots = tl.fma(last - first, pivot.to(tl.float32) / NUM_PIVOTS, first)
        at = (
            notes + NUM_SETTINGS + (2 + done * NUM_PIVOTS + pivot[:, None]) * SPLITS + part[None, :]
        )
        weights = tl.sum(tl.load(at, (part < splits)[None, :], 0.0), 1)
        if done == 0:
            wanted = tl.where(top_k > 0, top_k, top_p * tl.max(weights, 0))
        enough = weights >= wanted * (1.0 + slack)
        low = tl.max(tl.where(enough, pivots, float("-inf")), 0)
        too_few = weights < wanted * (1.0 - slack)
        high = tl.minimum(high, tl.min(tl.where(too_few, pivots, float("inf")), 0))
    return low, high


@triton.jit
def _start_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    notes_ptr,
    sums_ptr,
    vocab_size,
    stride,
    NOTES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Step 1, and the settings of the line; those of a greedy row filter nothing."""
    line = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    notes = notes_ptr + line * NOTES
    x = _load_logits(logits_ptr, line, stride, vocab_size, CHUNK)
    tl.store(notes + NUM_SETTINGS + part, tl.max(x, 0))
    lowest = tl.min(tl.where(x > float("-inf"), x, float("inf")), 0)
    tl.store(notes + NUM_SETTINGS + SPLITS + part, lowest)
    if part == 0:
        row = tl.load(rows_ptr + line)
        temperature = tl.load(temperature_ptr + row)
        draws = temperature > 0
        tl.store(notes, temperature)
        tl.store(notes + 1, tl.load(top_k_ptr + row, draws, 0).to(tl.float32))
        tl.store(notes + 2, tl.load(top_p_ptr + row, draws, 1.0))
        tl.store(notes + 3, tl.load(log_min_p_ptr + row, draws, float("-inf")))
        tl.store(sums_ptr + line * (2 * SPLITS + 1), 0)


@triton.jit
def _weigh_kernel(
    logits_ptr,
    notes_ptr,
    vocab_size,
    stride,
    splits,
    ROUND: tl.constexpr,
    NOTES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Step 2: the chunk's weight at or above each pivot."""
    line = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    notes = notes_ptr + line * NOTES
    temperature, top_k, top_p, log_min_p = _load_settings(notes)
    if (top_k > 0) | (top_p < 1.0):
        x = _load_logits(logits_ptr, line, stride, vocab_size, CHUNK)
        top, bottom = _load_extremes(notes, splits, SPLITS)
        low, high = _narrow(notes, top, bottom, temperature, top_k, top_p, splits, SPLITS, ROUND)
        first, last = tl.maximum(low, bottom), tl.minimum(high, top)
        weight = tl.exp2((x - top) * (1.4426950408889634 / temperature))
        weight = tl.where(x >= top + log_min_p * temperature, weight, 0.0)
        weight = tl.where(top_k > 0, 1.0, weight)
        at = notes + NUM_SETTINGS + (2 + ROUND * NUM_PIVOTS) * SPLITS + part
        for index in tl.static_range(NUM_PIVOTS):
            pivot = tl.fma(last - first, index / NUM_PIVOTS, first)
            # A product, not a choice: it takes two instructions instead of three.
            tl.store(at + index * SPLITS, tl.sum((x >= pivot).to(tl.float32) * weight, 0))


@triton.jit
def _collect_kernel(
    logits_ptr,
    notes_ptr,
    sums_ptr,
    collected_ptr,
    vocab_size,
    stride,
    splits,
    NOTES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
):
    """Step 3. With top_k everything above the bracket is collected too: top_p may need it."""
    line = tl.program_id(1).to(tl.int64)
    notes = notes_ptr + line * NOTES
    sums = sums_ptr + line * (2 * SPLITS + 1)
    temperature, top_k, top_p, log_min_p = _load_settings(notes)
    if (top_k > 0) | (top_p < 1.0):
        x = _load_logits(logits_ptr, line, stride, vocab_size, CHUNK)
        top, bottom = _load_extremes(notes, splits, SPLITS)
        low, high = _narrow(
            notes, top, bottom, temperature, top_k, top_p, splits, SPLITS, NUM_ROUNDS
        )
        x = divide(x, temperature)
        inside = (x >= divide(low, temperature)) & (x > float("-inf"))
        if top_k == 0:
            high = divide(high, temperature)
            inside = inside & (x < high)
            best = divide(top, temperature)
            mass = tl.where(x >= best + log_min_p, mass_of(x, best), 0)
            at = sums + 1 + tl.program_id(0)
            tl.store(at, tl.sum(tl.where(x >= high, mass, 0), 0))
            tl.store(at + SPLITS, tl.sum(mass, 0))
        count = tl.sum(inside.to(tl.int32), 0)
        if count > 0:
            first = tl.atomic_add(sums, count.to(tl.int64), sem="relaxed").to(tl.int32)
            place = first + tl.cumsum(inside.to(tl.int32), 0) - 1
            at = collected_ptr + line * MAX_COLLECTED + place
            tl.store(at, x, inside & (place < MAX_COLLECTED))


@triton.jit
def _finish_kernel(
    logits_ptr,
    notes_ptr,
    sums_ptr,
    collected_ptr,
    out_ptr,
    vocab_size,
    stride,
    splits,
    NOTES: tl.constexpr,
    SPLITS: tl.constexpr,
    SEARCHES: tl.constexpr,
    MAX_COLLECTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Step 4: the cutoff, as a logit divided by the temperature."""
    line = tl.program_id(0).to(tl.int64)
    notes = notes_ptr + line * NOTES
    temperature, top_k, top_p, log_min_p = _load_settings(notes)
    top, bottom = _load_extremes(notes, splits, SPLITS)
    best = divide(top, temperature)
    floor = best + log_min_p
    cutoff = floor
    if SEARCHES:
        searches = ((top_k > 0) | (top_p < 1.0)) & (top > float("-inf"))
        if searches:
            low, high = _narrow(
                notes, top, bottom, temperature, top_k, top_p, splits, SPLITS, NUM_ROUNDS
            )
            low = divide(tl.maximum(low, bottom), temperature)
            high = divide(tl.minimum(high, top), temperature)
            sums = sums_ptr + line * (2 * SPLITS + 1)
            count = tl.load(sums).to(tl.int32)
            usable = count <= MAX_COLLECTED
            found = collected_ptr + line * MAX_COLLECTED
            none = tl.full([], 0, tl.int64)
            base, left = none, none
            if top_k > 0:
                high = best
            else:
                part = tl.arange(0, SPLITS)
                base = tl.sum(tl.load(sums + 1 + part, part < splits, 0), 0)
                left = tl.sum(tl.load(sums + 1 + SPLITS + part, part < splits, 0), 0)
                if usable:
                    lowest = to_key(tl.maximum(low, floor)) - 1
                    inside, _, _ = weight_above(
                        found, count, temperature, best, lowest, True, True, TILE
                    )
                    share = top_p.to(tl.float64) * left.to(tl.float64)
                    usable = (base.to(tl.float64) < share) & (
                        (base + inside).to(tl.float64) >= share
                    )
            if usable:
                cutoff = find_cutoff(
                    found, count, temperature, top_k, top_p, best, floor, low, high, base, left,
                    True, TILE,
                )  # fmt: skip
            else:
                cutoff = find_cutoff(
                    logits_ptr + line * stride, vocab_size, temperature, top_k, top_p, best, floor,
                    divide(bottom, temperature), best, none, none, False, TILE,
                )  # fmt: skip
    tl.store(out_ptr + line, tl.where(temperature > 0, cutoff, float("-inf")))


def token_cutoffs(logits: Tensor, rows: Tensor, settings: RowSettings, kinds: Kinds) -> Tensor:
    """Lowest logit kept in each line, once divided by the temperature; float32 [S].

    It keeps the set that the reference's cutoff keeps; masses may differ from the reference's in
    the last place.
    """
    (num_lines, vocab_size), device = logits.shape, logits.device
    splits = -(-vocab_size // CHUNK)
    padded = 1 << (splits - 1).bit_length()
    num_notes = NUM_SETTINGS.value + NUM_SUMS.value * padded
    sizes = {"NOTES": num_notes, "SPLITS": padded, "CHUNK": CHUNK, "num_warps": NUM_WARPS}
    notes = torch.empty((num_lines, num_notes), dtype=torch.float32, device=device)
    sums = torch.empty((num_lines, 2 * padded + 1), dtype=torch.int64, device=device)
    collected = torch.empty((num_lines, MAX_COLLECTED), dtype=torch.float32, device=device)
    out = torch.empty(num_lines, dtype=torch.float32, device=device)
    shape = (vocab_size, logits.stride(0))
    grid = (splits, num_lines)
    _start_kernel[grid](
        logits,
        rows,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.log_min_p,
        notes,
        sums,
        *shape,
        **sizes,
    )
    if kinds.searches:
        for index in range(NUM_ROUNDS.value):
            _weigh_kernel[grid](logits, notes, *shape, splits, ROUND=index, **sizes)
        _collect_kernel[grid](
            logits,
            notes,
            sums,
            collected,
            *shape,
            splits,
            MAX_COLLECTED=MAX_COLLECTED,
            **sizes,
        )
    _finish_kernel[(num_lines,)](
        logits,
        notes,
        sums,
        collected,
        out,
        *shape,
        splits,
        NOTES=num_notes,
        SPLITS=padded,
        SEARCHES=kinds.searches,
        MAX_COLLECTED=MAX_COLLECTED,
        TILE=TILE,
        num_warps=8,
    )
    return out
