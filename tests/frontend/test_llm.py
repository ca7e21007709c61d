"""The `LLM` class from outside: what it takes and returns, and what its calls share."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import quire.outputs
import quire.sampling_params
from quire import LLM, QuireError, RequestOutput, SamplingParams
from quire.protocol.sampling import RequestOutputKind
from tests.frontend.conftest import Tiny
from tests.tiny import END_ID, MAX_LEN, ascii_tokenizer, assert_at_rest, greedy, text_ids, tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXTS = ["The future of AI is", "How does PagedAttention work?", "def f(x):"]


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **more: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **more)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# --- what goes in, what comes out -----------------------------------------------------------------


def test_outputs_are_those_of_transformers(llm: LLM, tiny: Tiny) -> None:
    """Tokens, text and all the fields of a plain call, in the order of the prompts."""
    outputs = generate(llm, TEXTS)
    prompts = [text_ids(text) for text in TEXTS]
    for text, ids, expected, output in zip(
        TEXTS, prompts, greedy(tiny.model, prompts, 12), outputs, strict=True
    ):
        assert output.prompt == text and output.prompt_token_ids == ids
        assert output.finished and output.prompt_logprobs is None
        assert output.metrics is not None
        times = output.metrics
        assert (
            times.arrival_time
            <= times.first_scheduled_time
            <= times.first_token_time
            <= times.finished_time
        )
        (completion,) = output.outputs
        assert completion.index == 0 and completion.token_ids == expected
        assert completion.text == ascii_tokenizer().decode(expected)
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.logprobs is None and completion.cumulative_logprob is None
        assert completion.finished
    assert len({output.request_id for output in outputs}) == 3


def test_all_kinds_of_prompts_are_the_same_prompt(llm: LLM) -> None:
    text = TEXTS[0]
    ids = text_ids(text)
    (expected,) = tokens(generate(llm, text))
    for prompt in (
        {"prompt": text},
        {"prompt_token_ids": ids},
        ids,
        np.array(ids),
        {"prompt": "shown only", "prompt_token_ids": ids},
        [text],
        [{"prompt": text}],
        [{"prompt_token_ids": ids}],
        (text,),
        [ids],
        (prompt for prompt in [text]),
    ):
        assert tokens(generate(llm, prompt)) == [expected]
    mixed = generate(llm, [text, ids, {"prompt": text}, {"prompt_token_ids": np.array(ids)}])
    assert tokens(mixed) == [expected] * 4
    assert [output.prompt for output in mixed] == [text, None, text, None]
    assert generate(llm, []) == []


def test_one_params_for_all_or_one_for_each(llm: LLM) -> None:
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(ids) for ids in tokens(generate(llm, TEXTS, each))] == [1, 5, 3]
    assert [len(ids) for ids in tokens(generate(llm, TEXTS, tuple(each)))] == [1, 5, 3]
    assert [len(ids) for ids in tokens(generate(llm, TEXTS, each[1]))] == [5, 5, 5]
    assert each[0].max_tokens == 1, "the caller's objects stay as they were"


def test_truncation_and_special_tokens(tiny: Tiny, llm: LLM) -> None:
    ids = text_ids(TEXTS[1])
    for kwargs, kept in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": 500}, ids),
        ({"add_special_tokens": False}, ids),
    ):
        (output,) = generate(llm, TEXTS[1], tokenization_kwargs=kwargs)
        assert output.prompt_token_ids == kept
    (output,) = generate(llm, [[5] * 1000], tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert len(output.prompt_token_ids) == MAX_LEN - 1


def test_without_a_tokenizer(tiny: Tiny) -> None:
    """Token ids in, token ids out."""
    with tiny_llm(tiny.folder, skip_tokenizer_init=True) as llm:
        (output,) = generate(llm, text_ids(TEXTS[0]))
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 12
        with pytest.raises(QuireError, match=r"prompts\[1\] is text.*skip_tokenizer_init"):
            generate(llm, [[1, 2], TEXTS[0]])
        with pytest.raises(QuireError, match=r"stop=.*needs a tokenizer"):
            generate(llm, [1, 2], SamplingParams(stop="x"))
        with pytest.raises(QuireError, match="skip_tokenizer_init"):
            llm.get_tokenizer()


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(TEXTS, GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown and "3/3" in shown and "tok/s" in shown
    generate(llm, TEXTS)
    assert "Processed" not in capsys.readouterr().err


def test_public_modules_name_the_public_classes() -> None:
    assert quire.outputs.RequestOutput is RequestOutput
    assert quire.sampling_params.SamplingParams is SamplingParams
    assert quire.sampling_params.RequestOutputKind is RequestOutputKind


# --- chat -----------------------------------------------------------------------------------------

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
ASK = [{"role": "user", "content": "What is a block?"}]


def test_chat_is_the_rendered_prompt(llm: LLM, tiny: Tiny) -> None:
    """The template's text as transformers renders it, with no special tokens added to it."""
    theirs = AutoTokenizer.from_pretrained(tiny.folder)
    prompts = [
        theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in (HELLO, ASK)
    ]
    expected = tokens(generate(llm, prompts))
    outputs = llm.chat([HELLO, ASK], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts and tokens(outputs) == expected
    assert tokens(llm.chat(HELLO, GREEDY, use_tqdm=False)) == expected[:1]
    ids = llm.enqueue_chat(ASK, GREEDY)
    (waited,) = llm.wait_for_completion(use_tqdm=False)
    assert [waited.request_id] == ids and tokens([waited]) == expected[1:]
    streamed = "".join(
        output.outputs[0].text
        for output in llm.stream_chat(HELLO, _with_kind(RequestOutputKind.DELTA))
    )
    assert streamed == outputs[0].outputs[0].text


def test_tools_reach_a_template_that_has_no_place_for_them(llm: LLM) -> None:
    """As over HTTP: both render with the same function."""
    told: list[str] = []
    tokenizer, template = llm.get_tokenizer(), "{% for m in messages %}{{ m.content }} {% endfor %}"
    messages = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant"}]
    tool = {"type": "function", "function": {"name": "add"}}
    for tools in (None, [tool], [{"name": "add"}], ["add"]):
        (output,) = llm.chat(
            messages, SamplingParams(max_tokens=1), False, chat_template=template, tools=tools
        )
        assert output.prompt == tokenizer.render_chat(messages, chat_template=template, tools=tools)
        told.append(output.prompt)
    assert told[0] == "1 + 2?  "
    assert all("You may call functions." in text and "add" in text for text in told[1:])


def _with_kind(kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=kind)


def test_chat_options(llm: LLM) -> None:
    (output,) = llm.chat(
        [*ASK, {"role": "assistant", "content": "A block is"}],
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.prompt == "[user] What is a block?\n[assistant] A block is"
    (output,) = llm.chat(ASK, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "What is a block?!"


# --- calls side by side ---------------------------------------------------------------------------


def test_enqueued_requests_wait_for_completion(llm: LLM) -> None:
    expected = tokens(generate(llm, TEXTS))
    first = llm.enqueue(TEXTS[:2], GREEDY)
    second = llm.enqueue(TEXTS[2], GREEDY)
    assert tokens(generate(llm, TEXTS[1])) == expected[1:2], "other calls go on meanwhile"
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second
    assert tokens(outputs) == expected
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_streams_and_calls_interleave(llm: LLM) -> None:
    """Two open streams, stepped in turns, and a whole `generate` in between."""
    expected = [output.outputs[0].text for output in generate(llm, TEXTS)]
    delta = _with_kind(RequestOutputKind.DELTA)
    streams = [llm.stream(text, delta) for text in TEXTS[:2]]
    texts = [next(stream).outputs[0].text for stream in streams]
    assert generate(llm, TEXTS[2])[0].outputs[0].text == expected[2]
    for i, stream in enumerate(streams):
        texts[i] += "".join(output.outputs[0].text for output in stream)
    assert texts == expected[:2]


def test_a_stream_that_is_left_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(TEXTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm._core.scheduler.kv.pool.num_used > 0
    stream.close()
    generate(llm, TEXTS[1])
    assert_at_rest(llm)


def test_an_interrupted_call_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in mid-run: the requests of the call are gone, the engine goes on."""
    steps = iter(range(3))
    step = llm._core.step

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, TEXTS)
    monkeypatch.undo()
    generate(llm, TEXTS[0])
    assert_at_rest(llm)


# --- prefixes -------------------------------------------------------------------------------------

SYSTEM = "You are a helpful assistant. Always be concise."
QUESTIONS = ("What is Python?", "Explain recursion", "What are closures?")


def test_the_second_request_with_a_system_prompt_is_served_from_the_cache(tiny: Tiny) -> None:
    """Three requests one after the other at block_size=16, as a user would send them."""
    with tiny_llm(tiny.folder, block_size=16) as llm:
        prefix = len(text_ids(SYSTEM))
        outputs = [generate(llm, SYSTEM + question)[0] for question in QUESTIONS]
        cached = [output.num_cached_tokens for output in outputs]
        assert cached[0] == 0
        assert all(count is not None and count >= prefix - 1 for count in cached[1:])
        # All at once gives the same answers.
        assert tokens(generate(llm, [SYSTEM + question for question in QUESTIONS])) == tokens(
            outputs
        )
        assert llm.reset_prefix_cache()
        assert generate(llm, SYSTEM + QUESTIONS[0])[0].num_cached_tokens == 0


def test_salt_separates_and_switching_off_switches_off(tiny: Tiny, llm: LLM) -> None:
    prompt = SYSTEM + QUESTIONS[0]
    generate(llm, prompt)
    for salt in ("a", "b"):
        salted = {"prompt": prompt, "cache_salt": salt}
        assert generate(llm, salted)[0].num_cached_tokens == 0
        assert generate(llm, salted)[0].num_cached_tokens
    with tiny_llm(tiny.folder, enable_prefix_caching=False) as plain:
        for _ in range(2):
            assert generate(plain, prompt)[0].num_cached_tokens == 0
        assert plain.statistics().hit_rate == 0


@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_prompt_share_its_blocks(tiny: Tiny, caching: bool) -> None:
    """n=8 of a 97-token prompt: 24 blocks of 4 once, and two more for each completion."""
    with tiny_llm(tiny.folder, block_size=4, enable_prefix_caching=caching) as llm:
        params = SamplingParams(n=8, max_tokens=6, seed=5, ignore_eos=True)
        (output,) = generate(llm, [[7, 8, 9] * 32 + [1]], params)
        assert len({tuple(c.token_ids) for c in output.outputs}) == 8
        assert [c.index for c in output.outputs] == list(range(8))
        assert llm.statistics().peak_blocks == 24 + 8 * 2


# --- asking and ending ----------------------------------------------------------------------------


def test_metrics_and_statistics(tiny: Tiny) -> None:
    with tiny_llm(tiny.folder, block_size=16) as llm:
        generate(llm, TEXTS)
        generate(llm, TEXTS)
        readings = {(m.name, *m.labels.values()): m for m in llm.get_metrics()}
        num_prompt = 2 * sum(len(text_ids(text)) for text in TEXTS)
        values = {name: getattr(m, "value", None) for name, m in readings.items()}
        assert values["quire:prompt_tokens",] == num_prompt
        assert values["quire:generation_tokens",] == 2 * 3 * 12
        assert values["quire:request_success", "length"] == 6
        assert values["quire:num_requests_running",] == 0
        assert values["quire:kv_cache_usage_perc",] == 0
        assert 0 < values["quire:prefix_cache_hits",] < values["quire:prefix_cache_queries",]
        first_tokens = readings["quire:time_to_first_token_seconds",]
        assert getattr(first_tokens, "count", 0) == 6
        statistics = llm.statistics()
        assert statistics.prompt_tokens == num_prompt and statistics.num_preemptions == 0
        assert 0 < statistics.waste < 0.5 and 0 < statistics.hit_rate < 1
        assert 0 < statistics.peak_blocks <= statistics.num_blocks


def test_the_tokenizer_is_the_models(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode(TEXTS[0]) == text_ids(TEXTS[0])
    assert tokenizer.eos_token_id == END_ID


def test_shutdown_frees_the_weights_and_ends_open_streams(tiny: Tiny) -> None:
    with tiny_llm(tiny.folder) as llm:
        worker = llm._core.executor._worker  # type: ignore[attr-defined]
        kept = weakref.ref(worker.runner.kv.data)
        weights = [weakref.ref(p) for p in worker.runner.model.parameters()]
        del worker
        stream = llm.stream(TEXTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
    gc.collect()
    assert kept() is None and all(weight() is None for weight in weights)
    with pytest.raises(QuireError, match="shut down"):
        next(stream)
    with pytest.raises(QuireError, match="the engine has stopped: it was shut down"):
        generate(llm, TEXTS[0])
    llm.shutdown()


@pytest.mark.parametrize(
    "name", ["encode", "classify", "score", "reward", "sleep", "wake_up", "collective_rpc"]
)
def test_methods_that_are_not_there_yet_say_so(llm: LLM, name: str) -> None:
    with pytest.raises(QuireError, match=rf"LLM\.{name} is not supported yet: \w+"):
        getattr(llm, name)("anything", other=1)
