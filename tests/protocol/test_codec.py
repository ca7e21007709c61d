"""What crosses a socket arrives as it was sent, and nothing else arrives at all."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import numpy as np
import pytest

from quire.protocol.codec import Decoder, encode
from quire.protocol.errors import OverloadedError, RequestError
from quire.protocol.messages import AddRequest, ErrorRecord, FromEngine, Outputs, ToEngine
from quire.protocol.output import (
    FinishedSequence,
    RequestProgress,
    SequencePromptLogprobs,
    StepOutput,
)
from quire.protocol.plan import LogprobArrays
from quire.protocol.request import KEY_BITS, NewRequest
from quire.protocol.sampling import RepetitionDetectionParams, SamplingParams


def logprobs(*index: int) -> LogprobArrays:
    count = len(index)
    return LogprobArrays(
        np.array(index, np.int32),
        np.arange(count * 3, dtype=np.int32).reshape(count, 3),
        -np.arange(count * 3, dtype=np.float32).reshape(count, 3),
        np.arange(1, count + 1, dtype=np.int32),
    )


def keys(*pairs: tuple[int, int]) -> list[int]:
    return [client << KEY_BITS | number for client, number in pairs]


def test_requests_arrive_whole() -> None:
    params = SamplingParams(
        n=3,
        temperature=0.7,
        stop=["a", "b"],
        logit_bias={5: -2.0},
        repetition_detection=RepetitionDetectionParams(8),
        bad_words=["x"],
        logprobs=4,
        seed=(1 << 64) - 1,
        extra_args={"deep": [{"er": None}]},
    )
    params.bad_words_token_ids = [[1, 2], [3]]
    sent = NewRequest(
        5 << KEY_BITS, "name#5", np.array([3, 1, 2], np.int32), params, 1.5, (0, 2), tenant="t"
    )
    got = Decoder[AddRequest](ToEngine).decode(encode(AddRequest(9, sent)))
    assert got.call == 9
    for item in fields(NewRequest):
        value, expected = getattr(got.request, item.name), getattr(sent, item.name)
        if item.name == "prompt_token_ids":
            assert value.dtype == np.int32 and value.tolist() == [3, 1, 2]
            value[0] = 4  # it may be changed
        else:
            assert value == expected, item.name


def test_each_client_gets_its_part_of_a_step() -> None:
    """Compared with a split token by token."""
    owners = keys((1, 0), (2, 0), (1, 1), (3, 7), (2, 1))
    output = StepOutput(
        keys=np.array(owners, np.int64),
        tokens=np.array([10, 20, 11, 30, 21], np.int32),
        logprobs=logprobs(0, 1, 4),
        prompt_logprobs=[SequencePromptLogprobs(owners[3], logprobs(1, 2))],
        finished=[FinishedSequence(owners[1], np.array([20], np.int32), "stop")],
        progress=[RequestProgress(keys((4, 0))[0], 9, 3, 0, None)],
    )
    parts = output.split_by_client()
    assert sorted(parts) == [1, 2, 3, 4]
    lines = {0: 0, 1: 1, 4: 2}
    for client, part in parts.items():
        sent = Outputs(part)
        got = Decoder[Outputs](FromEngine).decode(encode(sent)).output
        own = [i for i, key in enumerate(owners) if key >> KEY_BITS == client]
        assert got.keys.tolist() == [owners[i] for i in own]
        assert got.tokens.tolist() == [int(output.tokens[i]) for i in own]
        known = [(place, lines[i]) for place, i in enumerate(own) if i in lines]
        assert (got.logprobs is None) == (not known)
        if got.logprobs is not None and output.logprobs is not None:
            assert got.logprobs.index.tolist() == [place for place, _ in known]
            for name in ("token_ids", "logprobs", "ranks"):
                expected = getattr(output.logprobs, name)[[line for _, line in known]]
                assert np.array_equal(getattr(got.logprobs, name), expected)
    assert [p.key for p in parts[3].prompt_logprobs] == [owners[3]]
    assert [e.key for e in parts[2].finished] == [owners[1]] and not parts[1].finished
    assert len(parts[4].progress) == 1


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", encode({"type": "Nothing"}), encode(["AddRequest", 1])]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Decoder[object](ToEngine).decode(data)


def test_values_that_no_message_can_hold() -> None:
    for value in (1 << 70, "\ud800"):
        with pytest.raises(RequestError, match="cannot be sent"):
            encode({"value": value})


def test_errors_keep_their_kind() -> None:
    back = ErrorRecord.of(OverloadedError("full", retry_after_s=3.5)).to_error()
    assert isinstance(back, OverloadedError) and back.retry_after_s == 3.5
    assert isinstance(ErrorRecord.of(RequestError("bad")).to_error(), RequestError)
    assert "ZeroDivisionError" in str(ErrorRecord.of(ZeroDivisionError()).to_error())
