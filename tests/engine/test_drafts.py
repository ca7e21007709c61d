"""Speculation with the real model runner: drafts change how many steps a text takes, and no text.

The drafter knows what each request generates without drafts, and gets some of it wrong. On a CPU
results do not depend on what else a step computes, so tokens and logprobs must be equal bit by bit.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputs
from quire.frontend.inputs import TokenizationOptions, parse_prompts
from quire.protocol.errors import OptionError
from quire.protocol.plan import StepPlan
from quire.scheduler.sequence import Status
from quire.worker import draft_model
from tests.frontend.grammars import TIGHT
from tests.models.reference import VOCAB, random_tokens, save_safetensors
from tests.tiny import assert_at_rest, save_tiny, tiny_llm

pytestmark = pytest.mark.usefixtures("native")
MAX_LEN = 160
WRONG_EVERY = 5
"""About one draft in so many is wrong."""


class ScriptedDrafter:
    """Proposes what comes next in texts that it knows, some of it wrong, and now and then fewer
    drafts than it might or none."""

    def __init__(self, llm: LLM, texts: list[list[int]], num_drafts: int) -> None:
        self._table = llm._core.executor.runner.table
        self._texts = texts
        self._num_drafts = num_drafts
        self.num_accepted = 0

    def settle(self, plan: StepPlan) -> None:
        """Nothing is kept of rows."""

    def update(self, plan: StepPlan) -> None:
        """The table has all that it needs."""

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        if counts is not None:
            assert bool((counts >= 1).all())
            self.num_accepted += int(counts.sum()) - len(counts)

    def propose(self, rows: Tensor) -> Tensor:
        drafts = torch.full((len(rows), self._num_drafts), -1, dtype=torch.int32)
        for i, row in enumerate(rows.tolist()):
            known = self._table.token_ids[row, : int(self._table.num_tokens[row])].tolist()
            text = next((t for t in self._texts if t[: len(known)] == known), known)
            count = self._num_drafts - (len(known) % 7 == 0) - 9 * (len(known) % 11 == 0)
            for j, token in enumerate(text[len(known) : len(known) + max(count, 0)]):
                is_wrong = (7 * row + 3 * (len(known) + j)) % WRONG_EVERY == 0
                drafts[i, j] = (token + is_wrong) % VOCAB
        return drafts


Proposal = tuple[list[int], list[int]]
"""Known tokens, and the drafts behind them."""


class Recorder:
    """What a drafter proposes, with the tokens that it is proposed behind."""

    def __init__(self, llm: LLM) -> None:
        runner = llm._core.executor.runner
        self._table, self._drafter = runner.table, runner.drafter
        self.proposed: list[Proposal] = []
        runner.drafter = self

    def settle(self, plan: StepPlan) -> None:
        self._drafter.settle(plan)

    def update(self, plan: StepPlan) -> None:
        self._drafter.update(plan)

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        self._drafter.accepted(rows, counts)

    def propose(self, rows: Tensor) -> Tensor:
        known = [self._table.token_ids[row, : self._table.num_tokens[row]].tolist() for row in rows]
        found = self._drafter.propose(rows)
        self.proposed += zip(known, found.tolist(), strict=True)
        return found


class Steps:
    """What the plans of a run asked for."""

    def __init__(self, llm: LLM) -> None:
        self.num_steps = self.num_drafts = self.most_lines = 0
        self.mixed_with_beams = self.mixed_with_grammars = False
        self._columns = llm._core.scheduler.columns
        llm._core.on_plan = self._look

    def _look(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.num_drafts += int((plan.num_samples[plan.samples] - 1).sum())
        self.most_lines = max(self.most_lines, int(plan.num_samples.max(initial=0)))
        if plan.has_drafts:
            self.mixed_with_beams |= bool(self._columns.host_chooses[plan.rows].any())
            self.mixed_with_grammars |= bool(self._columns.constrained[plan.rows].any())


def speculate(llm: LLM, outputs: list[RequestOutput], num_drafts: int) -> ScriptedDrafter:
    """Let the engine verify drafts from these outputs of its own."""
    texts = [
        [*(output.prompt_token_ids or ()), *completion.token_ids]
        for output in outputs
        for completion in output.outputs
    ]
    drafter = ScriptedDrafter(llm, texts, num_drafts)
    llm._core.executor.runner.drafter = drafter
    llm._core.scheduler.speculation.num_drafts = num_drafts
    return drafter


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """All that a client sees of the results."""
    return [
        (
            output.prompt_logprobs,
            [
                (
                    c.token_ids,
                    c.text,
                    c.finish_reason,
                    c.stop_reason,
                    c.cumulative_logprob,
                    c.logprobs,
                )
                for c in output.outputs
            ],
        )
        for output in outputs
    ]


GREEDY = {"temperature": 0.0, "max_tokens": 40}
DRAWN = {"temperature": 0.9, "max_tokens": 40, "seed": 11}
LETTERS = StructuredOutputs(regex="[a-f]{8}[0-9]{8}")
"""One token at a time is free, and none is without a choice but the end."""
ENDLESS = StructuredOutputs(regex="([a-f]|the|[0-9]{2})*")
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "ignore_eos": True},
    "drawn": DRAWN,
    "filters": {**DRAWN, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "repetition": {**GREEDY, "repetition_penalty": 1.8},
    "frequency": {**DRAWN, "frequency_penalty": 1.5},
    "presence": {**GREEDY, "presence_penalty": 2.0},
    "min_tokens": {**DRAWN, "min_tokens": 12, "stop_token_ids": list(range(20, 60))},
    "bad_words": {**GREEDY, "bad_words": ["a", "e", "th"]},
    "logit_bias": {**DRAWN, "logit_bias": {str(i): 3.0 for i in range(40, 44)}},
    "allowed": {**DRAWN, "allowed_token_ids": list(range(30, 90))},
    "stop_token_ids": {**DRAWN, "stop_token_ids": list(range(70, 75))},
    "stop": {**DRAWN, "stop": ["e", "o"]},
    "logprobs": {**DRAWN, "logprobs": 3},
    "named_logprobs": {**GREEDY, "logprob_token_ids": [5, 6, 7]},
    "prompt_logprobs": {**GREEDY, "prompt_logprobs": 1, "logprobs": 0},
    "n": {**DRAWN, "n": 3, "logprobs": 1},
    "letters": {**DRAWN, "structured_outputs": LETTERS},
    "json": {**DRAWN, "max_tokens": 90, "structured_outputs": TIGHT},
    "greedy_json": {**GREEDY, "max_tokens": 90, "structured_outputs": TIGHT},
    "grammar_logprobs": {**DRAWN, "structured_outputs": ENDLESS, "logprobs": 2},
    "grammar_penalties": {
        **GREEDY,
        "structured_outputs": ENDLESS,
        "ignore_eos": True,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.2,
    },
    "grammar_stops": {
        **DRAWN,
        "structured_outputs": ENDLESS,
        "min_tokens": 8,
        "stop": ["e"],
        "bad_words": ["th"],
    },
    "grammar_n": {**DRAWN, "structured_outputs": TIGHT, "n": 2, "max_tokens": 60},
    "one": {**DRAWN, "max_tokens": 1},
    "two": {**GREEDY, "max_tokens": 2},
    "to_the_end": {"temperature": 0.0, "max_tokens": None, "ignore_eos": True},
}


def both(kind: str, **more: Any) -> list[SamplingParams]:
    """A feature as it stands there, and drawn instead of greedy or the other way round."""
    given = {**FEATURES[kind], **more}
    other = {**DRAWN, **given, "temperature": 0.0 if given["temperature"] else 0.9}
    if "n" in given:  # of which greedy decoding would make equal ones
        other["temperature"] = 0.4
    return [SamplingParams(**given), SamplingParams(**other)]


def prompts_of(count: int) -> list[list[int]]:
    """Of several lengths; half of each is shared, so that blocks are found again."""
    return [
        random_tokens(8 + i % 3, seed=i % 3) + random_tokens(1 + 5 * (i % 5), seed=100 + i)
        for i in range(count)
    ]


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts")
    save_tiny(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[RequestOutput]:
    """Every feature without drafts, two requests each."""
    params = [one for kind in FEATURES for one in both(kind)]
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN) as llm:
        return generate(llm, prompts_of(len(params)), params)


@pytest.mark.parametrize("kind", FEATURES)
def test_a_feature_by_itself(folder: Path, plain: list[RequestOutput], kind: str) -> None:
    place = list(FEATURES).index(kind)
    chosen = slice(2 * place, 2 * place + 2)
    prompts = prompts_of(len(plain))[chosen]
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN) as llm:
        drafter, steps = speculate(llm, plain[chosen], 4), Steps(llm)
        outputs = generate(llm, prompts, both(kind))
        assert seen(outputs) == seen(plain[chosen])
        assert_at_rest(llm)
    if kind not in ("one", "two"):
        assert 2 < steps.most_lines <= 5
        # A stop text may come before the first wrong draft, and a grammar cuts wrong ones.
        all_right = kind == "stop" or "structured_outputs" in FEATURES[kind]
        assert 0 < drafter.num_accepted < steps.num_drafts + all_right


SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "overlap": ({"max_steps_in_flight": 2}, False),
    "chunks": ({"block_size": 4, "max_num_batched_tokens": 21, "max_num_seqs": 9}, False),
    "pool": ({"block_size": 4, "num_gpu_blocks_override": 60}, True),
    "pool-overlap": (
        {"block_size": 8, "num_gpu_blocks_override": 34, "max_steps_in_flight": 2},
        True,
    ),
    "pool-far-ahead": (
        {"block_size": 8, "num_gpu_blocks_override": 34, "max_steps_in_flight": 4},
        True,
    ),
    "uncached": ({"enable_prefix_caching": False, "max_steps_in_flight": 2}, False),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_features_together(folder: Path, plain: list[RequestOutput], setting: str) -> None:
    """Twice, so that the second time finds prompts in the cache; some requests are preempted."""
    options, must_preempt = SETTINGS[setting]
    num_drafts = 1 + list(SETTINGS).index(setting) % 4
    params = [one for kind in FEATURES for one in both(kind)]
    prompts = prompts_of(len(params))
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, **options) as llm:
        drafter, steps = speculate(llm, plain, num_drafts), Steps(llm)
        for _ in range(2):
            outputs = generate(llm, prompts, params)
            assert seen(outputs) == seen(plain)
        assert (llm.statistics().num_preemptions > 0) == must_preempt
        assert_at_rest(llm)
    assert 0.2 * steps.num_drafts < drafter.num_accepted < 0.9 * steps.num_drafts


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (NGRAM, {}),
        ({**NGRAM, "prompt_lookup_max": 6}, {"max_steps_in_flight": 2, "block_size": 4}),
        ({"method": "auto", "prompt_lookup_min": 1}, {}),
        ({"method": "auto", "prompt_lookup_min": 1}, {"max_steps_in_flight": 2}),
        (NGRAM, {"tensor_parallel_size": 2, "num_threads": 1}),
    ],
    ids=["ngram", "ngram-overlap", "auto", "auto-overlap", "ngram-ranks"],
)
def test_drafts_from_the_text_itself(
    folder: Path, plain: list[RequestOutput], config: dict[str, Any], options: dict[str, Any]
) -> None:
    """Random models repeat themselves when they decode greedily."""
    params = [one for kind in FEATURES for one in both(kind)]
    ranks = "tensor_parallel_size" in options
    prompts = prompts_of(len(params))
    options = {"device": "cpu", "max_model_len": MAX_LEN, **options}
    with tiny_llm(folder, speculative_config=config, **options) as llm:
        outputs = generate(llm, prompts, params)
        if ranks:  # whose sums have another order
            assert [o.outputs[0].token_ids for o in outputs[:2]] == [
                o.outputs[0].token_ids for o in plain[:2]
            ]
            place = 2 * list(FEATURES).index("letters")
            letters = [o.outputs[0].text for o in outputs[place : place + 2]]
            assert all(re.fullmatch(str(LETTERS.regex), text) for text in letters)
        else:
            assert seen(outputs) == seen(plain)
        metrics = llm._core.metrics
        assert 0 < metrics.accepted_tokens.value < metrics.draft_tokens.value
        by_position = [one.value for one in metrics.accepted_by_position.values()]
        assert sum(by_position) == metrics.accepted_tokens.value
        assert by_position == sorted(by_position, reverse=True) and not any(by_position[4:])
        assert_at_rest(llm)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary and other shape, which knows nothing of the first."""
    path = tmp_path_factory.mktemp("other")
    save_tiny(path, "qwen2", seed=5, num_hidden_layers=1)
    return path


MODEL_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "same": ("folder", {}),
    "same-chunks": ("folder", {"block_size": 4, "max_num_batched_tokens": 21, "max_num_seqs": 9}),
    "same-pool": ("folder", {"block_size": 4, "num_gpu_blocks_override": 46}),
    "same-overlap": ("folder", {"block_size": 8, "max_steps_in_flight": 2}),
    "other": ("other_folder", {}),
    "other-pool": ("other_folder", {"block_size": 8, "num_gpu_blocks_override": 34}),
}


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("same-chunks", "other-pool")
        else name
        for name in MODEL_SETTINGS
    ],
)
def test_drafts_by_a_model(
    folder: Path, plain: list[RequestOutput], setting: str, request: pytest.FixtureRequest
) -> None:
    """Twice, so that the second time finds prompts in the cache."""
    drafter, options = MODEL_SETTINGS[setting]
    config = {"model": str(request.getfixturevalue(drafter)), "num_speculative_tokens": 3}
    params = [one for kind in FEATURES for one in both(kind)]
    options = {"device": "cpu", "max_model_len": MAX_LEN, **options}
    with tiny_llm(folder, speculative_config=config, **options) as llm:
        for _ in range(2):
            assert seen(generate(llm, prompts_of(len(params)), params)) == seen(plain)
        metrics = llm._core.metrics
        share = metrics.accepted_tokens.value / metrics.draft_tokens.value
        # With steps in flight, drafts that a grammar forbids are seen when they are verified.
        least = 0.6 if "overlap" in setting else 0.8
        assert share > least if drafter == "folder" else share < 0.3
        assert (llm.statistics().num_preemptions > 0) == ("pool" in setting)
        assert_at_rest(llm)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("folder", {}),
        ("folder", {"max_steps_in_flight": 2, "block_size": 8, "num_gpu_blocks_override": 34}),
        ("other_folder", {"block_size": 4, "max_num_batched_tokens": 21, "max_num_seqs": 9}),
    ],
    ids=["same", "same-pool-overlap", "other-chunks"],
)
def test_drafts_by_a_model_where_that_pays(
    folder: Path,
    plain: list[RequestOutput],
    drafter: str,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    """From the text, by the model or none, as the times of these steps happen to be."""
    config = {"method": "auto", "model": str(request.getfixturevalue(drafter))}
    params = [one for kind in FEATURES for one in both(kind)]
    options = {"device": "cpu", "max_model_len": MAX_LEN, **options}
    with tiny_llm(folder, speculative_config=config, **options) as llm:
        assert seen(generate(llm, prompts_of(len(params)), params)) == seen(plain)
        assert_at_rest(llm)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_model_makes_up_for_what_it_left_out(folder: Path, steps_in_flight: int) -> None:
    """It drafts in some steps and rows, and what it drafts then is what the target samples."""
    config = {"method": "auto", "model": str(folder), "num_speculative_tokens": 3}
    params = [SamplingParams(**FEATURES[kind]) for kind in ALIKE if kind != "n"]
    options = {"max_model_len": MAX_LEN, "max_steps_in_flight": steps_in_flight, "block_size": 8}
    options["enable_prefix_caching"] = False  # what is found there may have been left out
    with tiny_llm(folder, device="cpu", speculative_config=config, **options) as llm:
        speculation = llm._core.scheduler.speculation
        value, speculation._value = speculation._passes, None  # all that wait are verified
        assert value is not None
        value.is_measuring = lambda: False  # type: ignore[method-assign]
        choose, calls = value.choose, [0, 0]

        def now_and_then(plan: StepPlan, may: Any, num_drafts: int) -> Any:
            value._pays, value._trial_steps = plan.step % 16 < 6, 0
            value._decide = lambda rows, num_decoding: plan.step % 16 < 9  # type: ignore
            uses = choose(plan, may, num_drafts)
            calls[0] += int(uses.sum())
            calls[1] += int((~uses).sum())
            return uses

        value.choose = now_and_then  # type: ignore[method-assign]
        text = llm._core.executor.runner.drafter.text
        text.propose = lambda rows: torch.full((len(rows), 3), -1, dtype=torch.int32)
        recorder = Recorder(llm)
        outputs = generate(llm, prompts_of(len(params)), params)
        assert min(calls) > 30
        assert_all_agree(llm, outputs, recorder.proposed)


ALIKE = ("to_the_end", "drawn", "filters", "n", "bad_words", "allowed")
"""What a model that is its own target drafts without a mistake."""
SAME: dict[str, dict[str, Any]] = {
    "chunks": {"block_size": 4, "max_num_batched_tokens": 21, "max_num_seqs": 5},
    "overlap": {"block_size": 8, "max_steps_in_flight": 2},
    "pool": {"block_size": 4, "num_gpu_blocks_override": 44, "max_num_batched_tokens": 40},
    "pool-overlap": {"block_size": 8, "num_gpu_blocks_override": 28, "max_steps_in_flight": 2},
}


def assert_all_agree(llm: LLM, outputs: list[RequestOutput], proposed: list[Proposal]) -> None:
    """Nothing else was drafted than what texts go on with, as far as they do."""
    texts = [
        [*(output.prompt_token_ids or ()), *completion.token_ids]
        for output in outputs
        for completion in output.outputs
    ]
    compared = 0
    for known, drafts in proposed:
        found = [draft for draft in drafts if draft >= 0]
        ends = [text[len(known) :] for text in texts if text[: len(known)] == known]
        compared += len(found) if any(ends) else 0
        assert not any(ends) or any(found[: len(end)] == end[: len(found)] for end in ends if end)
    assert compared >= llm._core.metrics.accepted_tokens.value > 50


@pytest.mark.parametrize("setting", SAME)
def test_the_same_model_drafts_what_it_would_sample(folder: Path, setting: str) -> None:
    """Greedy and drawn, with the same random numbers at each place: in blocks that were shared,
    forked, copied and found again, and for requests that were preempted."""
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    params = [SamplingParams(**FEATURES[kind]) for kind in ALIKE]
    options = {"device": "cpu", "max_model_len": MAX_LEN, **SAME[setting]}
    with tiny_llm(folder, speculative_config=config, **options) as llm:
        recorder = Recorder(llm)
        for _ in range(2):
            outputs = generate(llm, prompts_of(len(params)), params)
        assert_all_agree(llm, outputs, recorder.proposed)
        assert any(output.num_cached_tokens for output in outputs)
        assert (llm.statistics().num_preemptions > 0) == ("pool" in setting)
        assert_at_rest(llm)


PLAIN: dict[str, dict[str, Any]] = {
    "drafted": {**GREEDY, "ignore_eos": True},
    "plain": {**GREEDY, "ignore_eos": True, "speculation": False},
    "several": {**DRAWN, "n": 2, "speculation": False},
    "some": {**DRAWN, "stop": ["e"], "speculation": False},
    "grammar": {**GREEDY, "structured_outputs": ENDLESS, "speculation": False},
    "beams": {},
}


@pytest.mark.parametrize("setting", ["plain", "overlap", "pool-overlap"])
def test_prefixes_are_found_for_a_draft_model_too(
    folder: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever generated them: later turns over them have all their drafts accepted, as where the
    turn before was drafted. Nothing is read that is not computed."""
    monkeypatch.setattr(draft_model, "MAX_LAG", 5)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    options = {"device": "cpu", "max_model_len": MAX_LEN, **SAME.get(setting, {})}
    beams = BeamSearchParams(beam_width=2, max_tokens=30)
    with tiny_llm(folder, speculative_config=config, **options) as llm:
        draft_kv, metrics = llm._core.executor.runner.draft_kv, llm._core.metrics
        assert draft_kv is not None and not draft_kv.data.any()
        draft_kv.data.fill_(float("nan"))
        kinds = [kind for kind in PLAIN for _ in range(2)]
        prompts = prompts_of(len(kinds))
        some = [SamplingParams(**PLAIN[kind]) for kind in kinds if kind != "beams"]
        parsed = parse_prompts([{"prompt_token_ids": p} for p in prompts[: len(some)]])
        requests = llm._submit(parsed, some, None, TokenizationOptions())
        found = llm.beam_search([{"prompt_token_ids": p} for p in prompts[len(some) :]], beams)
        texts = {"beams": [output.sequences[0].tokens for output in found]}
        outputs = llm._finish(requests, False)
        for kind, output in zip(kinds, outputs, strict=False):
            for one in output.outputs:
                texts.setdefault(kind, []).append(
                    [*(output.prompt_token_ids or ()), *one.token_ids]
                )
        num_cached = 0
        for kind in PLAIN:
            before = metrics.draft_tokens.value, metrics.accepted_tokens.value
            for text in texts[kind]:  # none is preempted
                (turn,) = generate(llm, [text], SamplingParams(**{**GREEDY, "ignore_eos": True}))
                num_cached += turn.num_cached_tokens or 0
            drafted = metrics.draft_tokens.value - before[0]
            assert metrics.accepted_tokens.value - before[1] == drafted > 20, kind
        assert num_cached > 60
        assert_at_rest(llm)


def test_a_prompt_is_found_for_a_draft_model_while_it_is_computed(folder: Path) -> None:
    """Its last token too, in a step of its own: others share its block from then on."""
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"device": "cpu", "max_model_len": MAX_LEN, "block_size": 4}
    options |= {"max_num_batched_tokens": 23, "speculative_config": config}
    prompt = random_tokens(24, seed=4)
    params = [SamplingParams(**PLAIN[kind]) for kind in ("plain", "drafted")]
    with tiny_llm(folder, **options) as llm:
        outputs = generate(llm, [prompt, prompt + random_tokens(5, seed=5)], params)
        assert [output.num_cached_tokens for output in outputs] == [0, 24]
        metrics = llm._core.metrics
        assert metrics.accepted_tokens.value == metrics.draft_tokens.value > 20


def test_what_was_put_off_is_computed_before_a_row_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that has become longer than the model drafts for is found up to that length."""
    monkeypatch.setattr(draft_model, "MAX_LAG", 100)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"device": "cpu", "max_model_len": MAX_LEN, "block_size": 4}
    options["speculative_config"] = {**config, "max_model_len": 60}
    prompt = random_tokens(9, seed=4)
    with tiny_llm(folder, **options) as llm:
        llm._core.executor.runner.draft_kv.data.fill_(float("nan"))
        passes: list[int] = []
        model = llm._core.executor.runner.drafter._model
        model.register_forward_hook(lambda *_: passes.append(1))
        params = SamplingParams(**{**PLAIN["plain"], "max_tokens": 100})
        (output,) = generate(llm, [prompt], params)
        assert len(passes) == 2, "the prompt, and what was put off"
        text = [*prompt, *output.outputs[0].token_ids][:33]
        params = SamplingParams(**{**PLAIN["drafted"], "max_tokens": 20})
        (turn,) = generate(llm, [text], params)
        assert turn.num_cached_tokens == 32
        metrics = llm._core.metrics
        assert metrics.accepted_tokens.value == metrics.draft_tokens.value > 12


def test_requests_without_drafts_are_computed_some_tokens_at_a_time(folder: Path) -> None:
    """So that they take little of the draft model."""
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config) as llm:
        passes: list[int] = []
        model = llm._core.executor.runner.drafter._model
        model.register_forward_hook(lambda *_: passes.append(1))
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40, speculation=False)
        generate(llm, prompts_of(4), params)
        # The prompts, 16 tokens twice, and the rest with the next step that there is.
        assert len(passes) == 3
        generate(llm, prompts_of(1), params)
        assert len(passes) == 3 + 4


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v2", "gpt2"])
def test_other_families_draft_for_themselves(tmp_path: Path, family: str) -> None:
    """With windows in some layers, latents and experts, and learned positions."""
    save_tiny(tmp_path, family)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    params = [SamplingParams(**FEATURES[kind]) for kind in ("to_the_end", "drawn")]
    options = {"device": "cpu", "max_model_len": 96, "block_size": 8}
    with tiny_llm(tmp_path, speculative_config=config, **options) as llm:
        recorder = Recorder(llm)
        outputs = generate(llm, prompts_of(2), params)
        assert_all_agree(llm, outputs, recorder.proposed)


@pytest.mark.parametrize("num_ranks", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_draft_together(
    folder: Path, plain: list[RequestOutput], num_ranks: int | None
) -> None:
    """With a draft model that is divided as the target is, or whole on each of them."""
    config = {"model": str(folder), "num_speculative_tokens": 3}
    config |= {"draft_tensor_parallel_size": num_ranks}
    params = both("greedy") + both("drawn")
    options: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1, "device": "cpu"}
    with tiny_llm(folder, max_model_len=MAX_LEN, speculative_config=config, **options) as llm:
        outputs = generate(llm, prompts_of(4), params)
        # Sums have another order there; these texts have no ties.
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in plain[:4]
        ]
        metrics = llm._core.metrics
        assert metrics.accepted_tokens.value == metrics.draft_tokens.value > 50
        assert_at_rest(llm)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("key", ["max_model_len", "max_position_embeddings"])
def test_a_model_drafts_for_texts_up_to_its_length(
    folder: Path, tmp_path: Path, key: str, steps_in_flight: int
) -> None:
    """Longer ones go on without drafts, and the model computes nothing for them."""
    config: dict[str, Any] = {"model": str(folder), "num_speculative_tokens": 3}
    if key == "max_model_len":
        config[key] = 40
    else:
        save_tiny(tmp_path, max_position_embeddings=40)
        config["model"] = str(tmp_path)
    params = SamplingParams(**FEATURES["to_the_end"])
    options: dict[str, Any] = {"max_model_len": MAX_LEN, "max_steps_in_flight": steps_in_flight}
    with tiny_llm(folder, device="cpu", speculative_config=config, **options) as llm:
        steps, passes = Steps(llm), llm._core.executor.runner.drafter.passes
        lengths: list[int] = []
        table, forward = passes._table, passes._forward

        def counting(size: int, is_first: bool) -> Tensor:
            if is_first:
                lengths.extend(table.num_tokens[passes._inputs[0, :size]].tolist())
            return forward(size, is_first)

        passes._forward = counting
        (output,) = generate(llm, prompts_of(1), params)
        known = len(output.prompt_token_ids or ())
        assert len(output.outputs[0].token_ids) == MAX_LEN - known
        drafted = 40 - known
        assert drafted - 8 <= steps.num_drafts * 4 / 3 <= drafted + 4 * (steps_in_flight - 1)
        assert max(lengths) <= 40 + 4 * steps_in_flight
        # Others beside it have drafts, and a prompt may be too long from the start.
        outputs = generate(llm, [*prompts_of(2), list(range(1, 60))], params)
        assert outputs[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_a_draft_model_shares_the_memory_of_the_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its keys and values take as much as the target's, and start-up says so."""
    config = {"model": str(folder), "num_speculative_tokens": 2, "max_model_len": 50}
    options: dict[str, Any] = {"device": "cpu", "max_model_len": MAX_LEN, "block_size": 16}
    options["kv_cache_memory_bytes"] = 1 << 20
    found = []
    caplog.set_level(logging.INFO, logger="quire")
    for speculative_config in ({}, config):
        with tiny_llm(folder, speculative_config=speculative_config, **options) as llm:
            found.append(llm._core.scheduler.limits.num_blocks)
            size = llm._core.executor.runner.kv.layout.bytes_per_block
            kv = llm._core.executor.runner.draft_kv
    assert found[0] == (1 << 20) // size and found[1] == ((1 << 20) - size) // (2 * size)
    assert kv is not None and kv.layout.bytes_per_block == size
    said = f"draft model: {folder}, up to 2 drafts of texts of up to 50 tokens; "
    assert any(said in message for message in caplog.messages)


def test_ranks_of_a_draft_model_are_one_or_those_of_the_target(folder: Path) -> None:
    config = {"model": str(folder), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
    message = r"'draft_tensor_parallel_size'.* 1 or tensor_parallel_size \(1\), got 2"
    with pytest.raises(OptionError, match=message):
        tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config)


@pytest.mark.parametrize("difference", [-9, 12])
def test_a_vocabulary_may_be_padded_to_another_size(tmp_path: Path, difference: int) -> None:
    """Models of one family have the same tokens and matrices of different sizes. What the one that
    drafts does not have is read as another token and never drafted, nor is what it alone has."""
    target, other = tmp_path / "target", tmp_path / "other"
    model = save_tiny(target)
    save_tiny(other)
    small = min(VOCAB, VOCAB + difference)
    model.resize_token_embeddings(VOCAB + difference, mean_resizing=False)
    if difference > 0:  # the model would like them best
        model.lm_head.weight.data[VOCAB:] = 3 * model.lm_head.weight.data[:difference]
    save_safetensors(model, other)
    config = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 3}
    params = [SamplingParams(**FEATURES[kind]) for kind in ("to_the_end", "drawn", "repetition")]
    prompts = [[*prompt[:-2], small - 1, small, prompt[-1]][-9:] for prompt in prompts_of(3)]
    prompts = [[token % VOCAB for token in prompt] for prompt in prompts]
    options = {"device": "cpu", "max_model_len": MAX_LEN}
    with tiny_llm(target, **options) as llm:
        expected = generate(llm, prompts, params)
    with tiny_llm(target, speculative_config=config, **options) as llm:
        recorder = Recorder(llm)
        assert seen(generate(llm, prompts, params)) == seen(expected)
        drafted = [draft for _, drafts in recorder.proposed for draft in drafts if draft >= 0]
        assert max(drafted) < small
        metrics = llm._core.metrics
        share = metrics.accepted_tokens.value / metrics.draft_tokens.value
        # The smaller model reads texts in which there are other tokens.
        assert share > (0.7 if difference > 0 else 0.1)


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_model_with_other_tokens_cannot_draft(
    folder: Path, tmp_path: Path, has_tokenizer: bool
) -> None:
    save_tiny(tmp_path, vocab_size=VOCAB + 3)
    message, file = "without a tokenizer.json", tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    if has_tokenizer:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        file.write_text(json.dumps(content), encoding="utf-8")
        message = r"token \d+ is 'a' and not 'b'"
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    with pytest.raises(OptionError, match=rf"of {VOCAB + 3} tokens.* one of {VOCAB}, .*{message}"):
        tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config)


@pytest.mark.parametrize("wanted", ["gguf", "gptq"])
def test_a_draft_model_is_kept_in_a_format_that_its_files_allow(folder: Path, wanted: str) -> None:
    config = {"model": str(folder), "num_speculative_tokens": 3, "quantization": wanted}
    message = rf"speculative_config\['quantization'\]='{wanted}' needs .*\['model'\]='{folder}'"
    with pytest.raises(OptionError, match=message):
        tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config)


@pytest.mark.parametrize("wish", [{"speculation": False}, {"extra_args": {"speculation": False}}])
def test_a_request_may_do_without_drafts(
    folder: Path, plain: list[RequestOutput], wish: dict[str, Any]
) -> None:
    params = both("greedy", **wish)
    options = {"device": "cpu", "max_model_len": MAX_LEN, "speculative_config": NGRAM}
    with tiny_llm(folder, **options) as llm:
        assert seen(generate(llm, prompts_of(2), params)) == seen(plain[:2])
        assert llm._core.metrics.draft_tokens.value == 0


def test_accepted_drafts_save_steps(folder: Path, plain: list[RequestOutput]) -> None:
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN) as llm:
        prompts, params = prompts_of(1), SamplingParams(**FEATURES["greedy"])
        without = Steps(llm)
        generate(llm, prompts, params)
        speculate(llm, plain[:1], 4)
        steps = Steps(llm)
        generate(llm, prompts, params)
        assert steps.num_steps < 0.6 * without.num_steps


def test_beams_and_grammars_beside_drafts(folder: Path) -> None:
    """They have one line each, and the others' lines lie around theirs."""
    grammar = StructuredOutputs(regex="[a-f]{8}[0-9]{8}")
    params = [
        SamplingParams(**{**DRAWN, "ignore_eos": True, "logprobs": 1}),
        SamplingParams(**DRAWN, structured_outputs=grammar),
        SamplingParams(**FEATURES["repetition"]),
        SamplingParams(**DRAWN, structured_outputs=grammar, logprobs=2),
        SamplingParams(**FEATURES["greedy"]),
    ]
    prompts, beams = prompts_of(5), BeamSearchParams(beam_width=3, max_tokens=12)

    def run(llm: LLM) -> tuple[list[RequestOutput], list[Any]]:
        parsed = parse_prompts([{"prompt_token_ids": p} for p in prompts])
        requests = llm._submit(parsed, params, None, TokenizationOptions())
        found = llm.beam_search([{"prompt_token_ids": prompts[2]}], beams)
        outputs = llm._finish(requests, False)
        return outputs, [(s.tokens, s.cum_logprob) for s in found[0].sequences]

    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, max_steps_in_flight=2) as llm:
        expected, expected_beams = run(llm)
        drafter, steps = speculate(llm, expected, 3), Steps(llm)
        outputs, found_beams = run(llm)
        assert seen(outputs) == seen(expected)
        assert found_beams == expected_beams
        assert steps.mixed_with_beams and steps.mixed_with_grammars
        assert 0 < drafter.num_accepted < steps.num_drafts
        assert_at_rest(llm)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_forced_text_is_appended_as_without_drafts(folder: Path, steps_in_flight: int) -> None:
    """Drafts go on through text without a choice, in the tokens in which it is appended."""
    grammar = StructuredOutputs(regex="([a-f]{2}option[0-9]~option)*")
    params = [
        SamplingParams(**kind, structured_outputs=grammar, ignore_eos=True)
        for kind in ({**GREEDY, "max_tokens": 60}, {**DRAWN, "max_tokens": 60, "temperature": 2.0})
        for _ in range(2)
    ]
    options = {"max_model_len": MAX_LEN, "max_steps_in_flight": steps_in_flight}
    prompts = prompts_of(4)
    with tiny_llm(folder, device="cpu", **options) as llm:
        expected = generate(llm, prompts, params)
        drafter, steps = speculate(llm, expected, 5), Steps(llm)
        assert seen(generate(llm, prompts, params)) == seen(expected)
        assert 10 < drafter.num_accepted <= steps.num_drafts
        assert_at_rest(llm)


def test_a_row_that_is_cut_back_goes_on_as_before(folder: Path) -> None:
    """Again and again, with drafts waiting and steps in flight; penalties forget what was cut."""
    params = SamplingParams(**{**GREEDY, "frequency_penalty": 0.7, "repetition_penalty": 1.2})
    prompts = prompts_of(4)
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, max_steps_in_flight=2) as llm:
        expected = generate(llm, prompts, params)
        speculate(llm, expected, 3)
        core = llm._core
        dice, num_cuts = np.random.default_rng(0), 0

        def cut_some(plan: StepPlan) -> None:
            """After a plan was made: the next one tells the worker."""
            nonlocal num_cuts
            running = [r for r in core.scheduler.by_row if r and r.status is Status.RUNNING]
            for request in running:
                generated = request.num_known - request.num_prompt
                if generated > 4 and num_cuts < 25 and dice.random() < 0.3:
                    core.scheduler.cut_back(request, request.num_known - int(dice.integers(1, 4)))
                    num_cuts += 1

        core.on_plan = cut_some
        requests = llm._submit(
            parse_prompts([{"prompt_token_ids": p} for p in prompts]),
            params.clone(),
            None,
            TokenizationOptions(),
        )
        outputs = llm._finish(requests, False)
        assert num_cuts == 25
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in expected
        ]
        assert_at_rest(llm)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("mistral", None),
        ("qwen3", None),
        ("gpt2", None),
        ("llama", "int4"),
        ("mixtral", None),
        ("qwen3_moe", "int8"),
    ],
)
def test_other_families_and_formats(tmp_path: Path, family: str, quantization: str | None) -> None:
    """With windows, experts and packed weights. Blocks behind a window are given back by what was
    accepted, not by what was allocated."""
    save_tiny(tmp_path, family, **({"sliding_window": 24} if family == "mistral" else {}))
    kinds = ("greedy", "drawn", "repetition", "logprobs", "to_the_end")
    params = [SamplingParams(**FEATURES[kind]) for kind in kinds]
    prompts = prompts_of(len(params))
    options: dict[str, Any] = {"max_model_len": MAX_LEN, "quantization": quantization}
    options |= {"block_size": 4, "max_steps_in_flight": 2}
    with tiny_llm(tmp_path, device="cpu", **options) as llm:
        expected = generate(llm, prompts, params)
        drafter, steps = speculate(llm, expected, 3), Steps(llm)
        assert seen(generate(llm, prompts, params)) == seen(expected)
        assert 0 < drafter.num_accepted < steps.num_drafts
        assert_at_rest(llm)
