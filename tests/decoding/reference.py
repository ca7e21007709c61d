"""Sampling written the plain way: one request at a time, Python and numpy, no code of Quire's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.protocol.sampling import SamplingParams

Floats = NDArray[np.float32]
M32 = 0xFFFFFFFF


def processed(
    logits: Floats,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    stop_token_ids: Sequence[int] = (),
) -> Floats:
    """Logits after masks, bias and penalties, before temperature."""
    x = np.array(logits, np.float32)
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -np.inf
    known = [*prompt, *generated]
    for word in params.bad_words_token_ids:
        before = len(word) - 1
        if len(known) >= before and known[len(known) - before :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    if len(generated) < params.min_tokens:
        x[list(stop_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in set(known):
        penalty = np.float32(params.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(generated):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(generated.count(token))
        x[token] -= np.float32(params.presence_penalty)
    return x


def kept_tokens(logits: Floats, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that survive the filters, by probabilities in double precision."""
    x = logits.astype(np.float64)
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    kept = [i for i in range(len(x)) if probs[i] > 0 and probs[i] >= min_p * probs.max()]
    if top_k:
        kth = sorted((probs[i] for i in kept), reverse=True)[:top_k][-1]
        kept = [i for i in kept if probs[i] >= kth]
    if top_p < 1:
        left = math.fsum(probs[i] for i in kept)
        above = {i: math.fsum(probs[j] for j in kept if probs[j] > probs[i]) for i in kept}
        kept = [i for i in kept if above[i] < np.float32(top_p) * left]
    return set(kept)


def _mix(x: int, key: int = 0) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D & M32) ^ key
    x ^= x >> 15
    x = x * 0x846CA68B & M32
    return x ^ x >> 16


def uniform(seed: int, position: int, token: int) -> np.float32:
    key0 = _mix(seed & M32 ^ _mix(position + 0x9E3779B9 & M32))
    key1 = _mix(seed >> 32 & M32 ^ _mix(position + key0 & M32))
    bits = _mix(_mix(token + 0x9E3779B9 & M32) ^ key0, key1)
    w = np.float32(bits & 0x7FFFFFFF) * np.float32(2**-31) + np.float32(2**-32)
    return min(w, np.float32(1 - 2**-24))


def chosen(logits: Floats, params: SamplingParams, seed: int, position: int) -> int:
    """The token drawn from processed logits."""
    if params.temperature == 0:
        return int(logits.argmax())
    x = logits / np.float32(params.temperature)
    kept = kept_tokens(x, params.top_k, params.top_p, params.min_p)
    noise = {i: -math.log(-math.log1p(-float(uniform(seed, position, i)))) for i in kept}
    return max(sorted(kept), key=lambda i: float(x[i]) + noise[i])


def logprobs(logits: Floats) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def rank(logits: Floats, token: int) -> int:
    return 1 + sum(1 for x in logits if x > logits[token])
