"""Structured output from a model whose logits are random: nothing but the masks makes it valid."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from quire import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutputs
from quire.engine.structured_output.compiler import MAX_CACHED
from quire.engine.structured_output.matcher import SEQUENCES_PER_START
from quire.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from tests.frontend.conftest import Tiny
from tests.frontend.grammars import PERSON, TIGHT, run
from tests.tiny import END_ID, assert_at_rest, text_ids, tiny_llm

pytest.importorskip("llguidance", reason="llguidance is not installed")

QUICK = settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.fixture(scope="module")
def slow_llm(tiny: Tiny) -> Iterator[LLM]:
    """Without jump-ahead."""
    config = {"jump_ahead": False}
    with tiny_llm(tiny.folder, structured_outputs_config=config) as engine:
        yield engine
        assert_at_rest(engine)


# --- any grammar --------------------------------------------------------------------------------

NAMES = st.text("abcdef_", min_size=1, max_size=8)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
    st.builds(lambda p: {"type": "string", "pattern": p}, st.sampled_from(["^a[bc]{2}$", "^x?y$"])),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-50, 5000),
        st.integers(-50, 5000),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(NAMES, st.integers(-9, 99), st.booleans()), min_size=1, max_size=3),
    ),
    st.builds(lambda value: {"const": value}, st.one_of(NAMES, st.integers(0, 9))),
)


def _object(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.sets(NAMES, max_size=2)),
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": 2},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


@given(schema=SCHEMAS, seed=st.integers(0, 2**31), tight=st.booleans())
@QUICK
def test_any_schema_holds(llm: LLM, schema: Any, seed: int, tight: bool) -> None:
    """Every finished document is what `jsonschema` calls valid, and short ones do finish."""
    grammar = StructuredOutputs(json=schema, disable_any_whitespace=tight)
    for completion in run(llm, grammar, seed=seed, n=2).outputs:
        assert completion.finish_reason == "stop" or (
            completion.finish_reason == "length" and len(completion.token_ids) == 150
        )
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
        assert not tight or completion.finish_reason == "stop" or len(str(schema)) > 200


PIECES = st.sampled_from(
    ["a", "[b-f]", "\\d", "x{2,3}", "(ab|cd)", "[^a-z\\n]", "e?", "\\.", "(?:no|yes){1,2}", "z*"]
)


@given(pieces=st.lists(PIECES, min_size=1, max_size=5), seed=st.integers(0, 2**31))
@QUICK
def test_any_expression_holds(llm: LLM, pieces: list[str], seed: int) -> None:
    pattern = "".join(pieces)
    (completion,) = run(llm, StructuredOutputs(regex=pattern), seed=seed).outputs
    if completion.finish_reason == "stop":
        assert re.fullmatch(pattern, completion.text), (pattern, completion.text)
    else:
        assert "*" in pattern


@given(
    choices=st.lists(st.text(" abc'\"\\/<{", min_size=1, max_size=9), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
@QUICK
def test_any_choice_holds(llm: LLM, choices: list[str], seed: int) -> None:
    (completion,) = run(llm, StructuredOutputs(choice=choices), seed=seed).outputs
    assert completion.text in choices and completion.finish_reason == "stop"


def test_many_choices(llm: LLM) -> None:
    choices = [f"c{i}" for i in range(5000)]
    (completion,) = run(llm, StructuredOutputs(choice=choices)).outputs
    assert completion.text in choices and completion.finish_reason == "stop"


LARK = 'start: "<a>" item+ "</a>"\nitem: "<b>" /[xyz]{1,3}/ "</b>"'
GBNF = 'root ::= "<a>" item+ "</a>"\nitem ::= "<b>" [xyz] [xyz]? [xyz]? "</b>"'


@pytest.mark.parametrize("grammar", [LARK, GBNF])
def test_grammars(llm: LLM, grammar: str) -> None:
    for seed in range(5):
        (completion,) = run(llm, StructuredOutputs(grammar=grammar), seed=seed).outputs
        assert re.fullmatch("<a>(<b>[xyz]{1,3}</b>)+</a>", completion.text)


@pytest.mark.parametrize(
    "tag",
    [
        {
            "structures": [{"begin": "e", "schema": {"type": "boolean"}, "end": "!"}],
            "triggers": ["e"],
        },
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["e"],
                "tags": [
                    {
                        "begin": "e",
                        "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
                        "end": "!",
                    }
                ],
            },
        },
    ],
)
def test_structural_tags(llm: LLM, tag: dict[str, Any]) -> None:
    """Free text, but each trigger begins a part of the schema."""
    (completion,) = run(llm, StructuredOutputs(structural_tag=tag), seed=4).outputs
    parts = r"[^e]*(e\s*(true|false)\s*![^e]*)+"
    cut_off = r"(e\s*\w*\s*)?" if completion.finish_reason == "length" else ""
    assert re.fullmatch(parts + cut_off, completion.text), completion.text


def test_json_object(llm: LLM) -> None:
    grammar = StructuredOutputs(json_object=True, disable_any_whitespace=True)
    texts = [run(llm, grammar, seed=s, max_tokens=50).outputs[0] for s in range(3)]
    assert all(one.text.startswith("{") for one in texts)
    for one in texts:
        if one.finish_reason == "stop":
            assert isinstance(json.loads(one.text), dict)


class Order(BaseModel):
    number: int = Field(ge=1, le=999)
    express: bool


def test_pydantic_models(llm: LLM) -> None:
    grammar = StructuredOutputs(json=Order, disable_any_whitespace=True)
    Order.model_validate_json(run(llm, grammar).outputs[0].text)


def test_closed_objects(llm: LLM) -> None:
    """`disable_additional_properties` closes objects that leave it open, and only objects."""
    schema = {"type": "object", "properties": {"a": {"enum": [{"properties": 1}]}}}
    grammar = StructuredOutputs(
        json=schema, disable_additional_properties=True, disable_any_whitespace=True
    )
    for seed in range(5):
        text = run(llm, grammar, seed=seed).outputs[0].text
        assert json.loads(text) in ({}, {"a": {"properties": 1}})


# --- beside other features ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar",
    [TIGHT, StructuredOutputs(json=PERSON), StructuredOutputs(grammar=LARK)],
    ids=["tight", "loose", "grammar"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_jump_ahead_changes_no_token(
    llm: LLM, slow_llm: LLM, grammar: StructuredOutputs, temperature: float
) -> None:
    """Penalties count the tokens that were jumped over, too."""
    params = {"temperature": temperature, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
    before = llm._core.scheduler._next_step
    fast = run(llm, grammar, **params).outputs[0]
    num_steps = llm._core.scheduler._next_step - before
    slow = run(slow_llm, grammar, **params).outputs[0]
    assert (fast.token_ids, fast.finish_reason) == (slow.token_ids, slow.finish_reason)
    assert num_steps < len(fast.token_ids)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_many_at_once(tiny: Tiny, llm: LLM, steps: int) -> None:
    """Constrained and free requests share steps, also with several in flight and where blocks are
    so short that requests are preempted, and get what each would get alone."""
    prompts = ["of the", "def main", "return"] * 2
    grammars = [TIGHT, StructuredOutputs(regex="[a-f]{50}"), None] * 2
    params = [
        SamplingParams(max_tokens=120, seed=i, ignore_eos=True, structured_outputs=grammar)
        for i, grammar in enumerate(grammars)
    ]
    alone = [
        llm.generate(prompt, one, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, one in zip(prompts, params, strict=True)
    ]
    short = {"num_gpu_blocks_override": 50, "block_size": 4}
    with tiny_llm(tiny.folder, max_steps_in_flight=steps, **short) as small:
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert small._core.metrics.preemptions.value > 0
        assert_at_rest(small)
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_sequences_move_while_they_run(tiny: Tiny, llm: LLM) -> None:
    """Another start of a grammar that many have is there only after some steps: the sequences that
    move to it go on where they stand."""
    params = SamplingParams(
        n=3 * SEQUENCES_PER_START,
        max_tokens=40,
        seed=1,
        structured_outputs=StructuredOutputs(regex="([a-f]{3}[0-9]){30}"),
    )
    with tiny_llm(tiny.folder, num_threads=4) as wide:
        grammars = wide._core.grammars
        pool = grammars._growth._pool = ThreadPoolExecutor(1)
        is_late = threading.Event()
        pool.submit(is_late.wait)
        num_starts: list[int] = []

        def look(_: object) -> None:
            num_starts.append(len({id(one.start) for one in grammars._matchers.values()}))
            if len(num_starts) == 10:
                is_late.set()
                for made in grammars._growth._growing.values():
                    made.result()

        wide._core.on_plan = look
        moved = wide.generate("of the", params, use_tqdm=False)[0]
        assert num_starts[9:11] == [1, 2]
    alone = llm.generate("of the", params, use_tqdm=False)[0]
    assert [one.text for one in moved.outputs] == [one.text for one in alone.outputs]


def test_more_grammars_than_are_kept(llm: LLM) -> None:
    """One call may have any number of different ones."""
    count = MAX_CACHED + 100
    grammars = [StructuredOutputs(regex=f"([a-f]+[0-9]){{5,30}}|x{i}y") for i in range(count)]
    x = text_ids("x")[0]
    params = [
        SamplingParams(max_tokens=9, seed=1, structured_outputs=grammar, logit_bias={x: 100.0})
        for grammar in grammars
    ]
    outputs = llm.generate(["of"] * count, params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [f"x{i}y" for i in range(count)]


def test_constrained_requests_keep_pace(tiny: Tiny) -> None:
    """With two steps in flight they take part in every step, beside a free one."""
    grammar = StructuredOutputs(regex="[a-f]{150}")
    params = [
        SamplingParams(max_tokens=40, seed=1, ignore_eos=True, structured_outputs=one)
        for one in (grammar, None)
    ]
    with tiny_llm(tiny.folder, max_steps_in_flight=2) as fast:
        fast.generate(["of the", "return"], params, use_tqdm=False)
        assert fast._core.scheduler._next_step <= 42
        assert_at_rest(fast)


def test_joining_while_steps_of_others_are_in_flight(tiny: Tiny) -> None:
    """A mask needs the token before: a constrained request waits for it, however many steps it did
    not take part in come first."""
    grammar = StructuredOutputs(regex="([a-f][0-9]){10}")
    with tiny_llm(tiny.folder, max_steps_in_flight=3) as ahead:
        free = ahead.stream("return", SamplingParams(max_tokens=100, seed=1, ignore_eos=True))
        next(free)
        joined = run(ahead, grammar).outputs[0]
        assert re.fullmatch("([a-f][0-9]){10}", joined.text), joined
        assert ahead._core.scheduler.num_running == 1, "the other still runs"
        list(free)
        assert_at_rest(ahead)


def test_several_sequences(llm: LLM) -> None:
    """Each of `n` has a state of its own, and the same as if it were asked for again."""
    first, second = (run(llm, TIGHT, n=4).outputs for _ in range(2))
    assert [one.text for one in first] == [one.text for one in second]
    assert len({one.text for one in first}) > 1
    for one in first:
        jsonschema.validate(json.loads(one.text), PERSON)


def test_streaming(llm: LLM) -> None:
    params = SamplingParams(max_tokens=150, seed=1, structured_outputs=TIGHT, output_kind=1)
    parts = [output.outputs[0] for output in llm.stream("of the", params)]
    whole = run(llm, TIGHT).outputs[0]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert 1 < len(parts) < len(whole.token_ids)


def test_logprobs_cover_every_token(llm: LLM) -> None:
    """Tokens that were jumped over would have none, so nothing is."""
    with_logprobs = run(llm, TIGHT, logprobs=1).outputs[0]
    assert with_logprobs.logprobs is not None
    assert len(with_logprobs.logprobs) == len(with_logprobs.token_ids)
    assert with_logprobs.token_ids == run(llm, TIGHT).outputs[0].token_ids


def test_stop_strings(llm: LLM) -> None:
    """A stop string ends the text wherever the grammar stands, also among forced tokens."""
    cut = run(llm, TIGHT, stop="customer_a").outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "customer_a")
    assert run(llm, TIGHT).outputs[0].text.startswith(cut.text)
    assert cut.text.endswith(',"')


def test_stop_token_ids(llm: LLM) -> None:
    """A stop token ends the request also where it is forced."""
    word = text_ids("customer_age")[0]
    cut = run(llm, StructuredOutputs(choice=["xcustomer_age"]), stop_token_ids=[word]).outputs[0]
    assert (cut.finish_reason, cut.stop_reason, cut.token_ids[-1]) == ("stop", word, word)


@pytest.mark.parametrize(("min_tokens", "by_word"), [(2, True), (3, False)])
def test_stop_tokens_are_forced_before_min_tokens(llm: LLM, min_tokens: int, by_word: bool) -> None:
    """The second token is a stop token: it ends the text if it may, else the text goes on to its
    own end."""
    word = text_ids("customer_age")[0]
    cut = run(
        llm,
        StructuredOutputs(choice=["xcustomer_age"]),
        stop_token_ids=[word],
        min_tokens=min_tokens,
    ).outputs[0]
    assert cut.token_ids[1] == word and (len(cut.token_ids) == 2) == by_word
    assert cut.finish_reason == "stop" and cut.stop_reason == (word if by_word else None)


def test_max_tokens_ends_early(llm: LLM) -> None:
    """ "length" where something is missing, at every possible place; "stop" where nothing is."""
    whole = run(llm, TIGHT).outputs[0]
    for limit in range(1, len(whole.token_ids) + 2):
        cut = run(llm, TIGHT, max_tokens=limit).outputs[0]
        assert cut.token_ids == whole.token_ids[:limit]
        assert cut.finish_reason == ("length" if limit < len(whole.token_ids) else "stop")


def test_end_of_sequence_only_where_the_text_may_end(llm: LLM) -> None:
    """However much it is favoured; and it is not chosen where it is to be ignored."""
    grammar = StructuredOutputs(regex="ab{0,40}")
    favoured = run(llm, grammar, logit_bias={END_ID: 100.0}).outputs[0]
    assert (favoured.text, favoured.token_ids[-1]) == ("a", END_ID)
    ignored = run(llm, grammar, logit_bias={END_ID: 100.0}, ignore_eos=True).outputs[0]
    assert (ignored.text, ignored.finish_reason) == ("a" + "b" * 40, "stop")
    late = run(llm, grammar, logit_bias={END_ID: 100.0}, min_tokens=9).outputs[0]
    assert len(late.token_ids) == 10 and late.text == "a" + "b" * (len(late.text) - 1)
    full = run(llm, StructuredOutputs(regex="ab{3}"), min_tokens=100).outputs[0]
    assert (full.text, full.finish_reason) == ("abbb", "stop")


def test_stop_tokens_while_the_end_is_ignored(llm: LLM) -> None:
    """`ignore_eos` is about ends of sequence; a stop token is one the request names itself."""
    grammar = StructuredOutputs(regex="ab{0,40}")
    params = {"ignore_eos": True, "stop_token_ids": [END_ID], "logit_bias": {END_ID: 100.0}}
    stopped = run(llm, grammar, **params).outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("a", "stop", END_ID)


def test_min_tokens_against_the_grammar(llm: LLM) -> None:
    """The one token that the grammar allows may not come yet: no other is taken instead, nor is it
    an end where one could come."""
    (a,) = text_ids("a")
    for min_tokens in (1, 5):
        dead = run(
            llm,
            StructuredOutputs(regex="ax"),
            temperature=0,
            min_tokens=min_tokens,
            stop_token_ids=[a],
        ).outputs[0]
        assert dead.finish_reason == "error" and "cannot go on" in str(dead.stop_reason)


@pytest.mark.parametrize("min_tokens", [2, 3, 9])
def test_min_tokens_where_only_the_end_is_left(llm: LLM, min_tokens: int) -> None:
    """The text ends there, once."""
    (a,) = text_ids("a")
    params = {"temperature": 0.0, "allowed_token_ids": [a, END_ID], "min_tokens": min_tokens}
    ended = run(llm, StructuredOutputs(regex="ab?"), **params).outputs[0]
    assert (ended.token_ids, ended.finish_reason) == ([a, END_ID], "stop")


def test_allowed_tokens(llm: LLM) -> None:
    """Both rules hold; where they contradict each other the request ends with the reason."""
    b, c = text_ids("b")[0], text_ids("c")[0]
    grammar = StructuredOutputs(regex="[a-f]{5}")
    assert set(run(llm, grammar, allowed_token_ids=[b, c, END_ID]).outputs[0].text) <= {"b", "c"}
    dead = run(llm, StructuredOutputs(regex="[ab]x"), allowed_token_ids=[b]).outputs[0]
    assert dead.finish_reason == "error"
    assert "allowed_token_ids leaves no token" in str(dead.stop_reason)


def test_prefix_caching(llm: LLM) -> None:
    """A cached prompt leads to the same text."""
    prompt = [7 + i % 50 for i in range(64)]
    llm.reset_prefix_cache()
    first, second = (run(llm, TIGHT, prompt={"prompt_token_ids": prompt}) for _ in range(2))
    assert (first.num_cached_tokens or 0) < (second.num_cached_tokens or 0)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_dead_ends(llm: LLM) -> None:
    """Where a grammar leads nowhere the text is not passed off as complete, also where the model
    would end it there."""
    grammar = StructuredOutputs(grammar='start: "a" nowhere\nnowhere: nowhere "b" | nowhere "c"')
    (b,) = text_ids("b")
    at_end: dict[str, Any] = {"logit_bias": {END_ID: 100.0}}
    at_b: dict[str, Any] = {"logit_bias": {b: 100.0}, "stop_token_ids": [b]}
    for params in ({}, at_end, at_b):
        dead = run(llm, grammar, **params).outputs[0]
        assert dead.finish_reason == "error" and "cannot go on" in str(dead.stop_reason)
        assert dead.text == "a"
    with pytest.raises(RequestError, match="cannot go on"):
        list(llm.stream("a", SamplingParams(structured_outputs=grammar)))


# --- callers and names ----------------------------------------------------------------------------


async def test_an_engine_without_other_work(tiny: Tiny) -> None:
    """Nothing but the end of the compilation wakes its loop."""
    engine = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB")
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["red", "green"]))
    outputs = [out async for out in engine.generate("of the", params)]
    assert outputs[-1].outputs[0].text in ("red", "green")
    engine.shutdown()


async def test_callers_of_one_engine(tiny: Tiny) -> None:
    """A wrong grammar is refused to its caller alone; one that leaves while its grammar is compiled
    harms no other."""
    engine = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB")

    async def ask(grammar: StructuredOutputs | None) -> str:
        params = SamplingParams(max_tokens=40, seed=2, structured_outputs=grammar)
        return [out async for out in engine.generate("of the", params)][-1].outputs[0].text

    leaving = [
        asyncio.create_task(ask(StructuredOutputs(regex=f"[a-f]{{{10 + i}}}"))) for i in range(4)
    ]
    await asyncio.sleep(0)
    for task in leaving[1:]:
        task.cancel()
    grammars = [StructuredOutputs(choice=["red", "green"]), StructuredOutputs(regex="["), None]
    made = await asyncio.gather(*map(ask, grammars), return_exceptions=True)
    assert made[0] in ("red", "green") and isinstance(made[2], str)
    assert isinstance(made[1], RequestError) and "structured_outputs.regex" in str(made[1])
    assert re.fullmatch("[a-f]{10}", await leaving[0])
    await engine.check_health()
    assert not engine.client.core.scheduler.waiting.held_back  # type: ignore[attr-defined]
    engine.shutdown()


def test_vllm_names() -> None:
    """Scripts written for vLLM, old and new, mean the same here."""
    assert StructuredOutputsParams is StructuredOutputs
    with pytest.warns(DeprecationWarning, match="StructuredOutputs"):
        old = GuidedDecodingParams(regex="a", backend="xgrammar")
    with pytest.warns(DeprecationWarning, match="structured_outputs"):
        params = SamplingParams(guided_decoding=old)
    assert params.structured_outputs == StructuredOutputs(regex="a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SamplingParams(structured_outputs={"choice": ["a"]}) == SamplingParams(
            structured_outputs=StructuredOutputs(choice=["a"])
        )
        assert params.clone() == params
