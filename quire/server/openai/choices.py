"""What completions and chat completions have in common: their replies are lists of choices."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from quire.frontend.async_llm import OutputStream
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.errors import QuireError, RequestError
from quire.protocol.output import RequestProgress
from quire.server.http.reply import DONE, encode, encoded, error_event, num_values, off_loop
from quire.server.preparation.bodies import GenerationBody


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_progress: bool | None = False


def refuse_stream_options(options: object, stream: bool | None) -> None:
    if options is not None and not stream:
        raise RequestError(
            "stream_options is only allowed with stream=true; set it, or leave stream_options out."
        )


class ChoicesBody(GenerationBody):
    """What completions and chat completions have in common: their replies are lists of choices."""

    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None

    def output_format(self) -> dict[str, Any]:
        return self.response_format or {}

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        refuse_stream_options(self.stream_options, self.stream)

    @property
    def usage_options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @property
    def wants_progress(self) -> bool:
        return bool(self.stream and self.usage_options.include_progress)


class Usage:
    """Counts over all prompts and completions of one reply; deltas or whole outputs alike."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.completion_tokens = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take in an output of the prompt with this index that was not taken in before."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens or 0
        self.completion_tokens += sum(len(one.token_ids) for one in output.outputs)

    def record(self) -> dict[str, Any]:
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def finish_reason(reason: str | None, has_calls: bool = False) -> str | None:
    """Why a choice ended, in OpenAI's words: a model that stops after calls waits for their
    results; a text that repeats itself was cut, as by a limit."""
    if reason == "repetition":
        return "length"
    return "tool_calls" if has_calls and reason == "stop" else reason


def stop_reason(one: CompletionOutput) -> int | str | None:
    """What made a choice end: a stop string or token, or "repetition"."""
    return "repetition" if one.finish_reason == "repetition" else one.stop_reason


class ChoicesReply:
    """Writes the reply to one request, whole or in chunks, which are put together from bytes: that
    runs for every token. What all chunks share is encoded once."""

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    last = DONE

    def __init__(self, body: ChoicesBody, response_id: str, model: str) -> None:
        self.id = response_id
        self.wants_progress = body.wants_progress
        self._created = int(time.time())
        self._model = model
        self._usage = Usage()
        options = body.usage_options
        self._tells_usage = bool(options.include_usage)
        """The last chunk does, and the others say that they do not."""
        self._continuous = bool(options.include_usage and options.continuous_usage_stats)
        self._head = b"data: " + encode(self._about(self.chunk_kind))[:-1] + b',"choices":['
        self._plain_chunks: dict[int, tuple[bytes, bytes]] = {}

    async def events(self, stream: OutputStream) -> AsyncIterator[bytes]:
        async for outputs in stream:
            data = []
            for index, output in outputs:
                if isinstance(output, RequestProgress):
                    data.append(self._progress(output))
                    continue
                self._count(index, output)
                if self._begins(index, output):
                    write = partial(self._chunks, index, output)
                    data.append(await off_loop(num_values([output]), write))
                else:
                    data += [self._chunk(index, output, one) for one in output.outputs]
            yield b"".join(data)
        if self._tells_usage:
            yield self._bare(usage=self._usage.record())

    def failure(self, error: QuireError) -> bytes:
        return error_event(error)

    def _begins(self, index: int, output: RequestOutput) -> bool:
        """Whether chunks of this output say what is about the prompt, which may be much."""
        raise NotImplementedError

    def _chunks(self, index: int, output: RequestOutput) -> bytes:
        return b"".join([self._chunk(index, output, one) for one in output.outputs])

    def _chunk(self, index: int, output: RequestOutput, one: CompletionOutput) -> bytes:
        """The chunks of one choice."""
        raise NotImplementedError

    def _count(self, index: int, output: RequestOutput) -> None:
        self._usage.add(index, output)

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = self._about(self.whole_kind)
        return {**about, "choices": choices, "usage": self._usage.record()}

    def _about(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _text(self, index: int, text: str, before: bytes, after: bytes) -> bytes:
        """A chunk with nothing but text in it; `before` and `after` surround the text."""
        parts = self._plain_chunks.get(index)
        if parts is None:
            end = b',"usage":null}\n\n' if self._tells_usage else b"}\n\n"
            parts = (
                self._head + b'{"index":%d,' % index + before,
                after + b',"logprobs":null,"finish_reason":null}]' + end,
            )
            self._plain_chunks[index] = parts
        return parts[0] + encode(text) + parts[1]

    def _choice_chunk(self, choice: dict[str, Any], **extra: Any) -> bytes:
        """A chunk with one choice, and what else it says at the top level."""
        if self._tells_usage:
            extra = {"usage": self._usage.record() if self._continuous else None, **extra}
        write = encoded if "prompt_logprobs" in choice or "prompt_logprobs" in extra else encode
        tail = b"," + write(extra)[1:] if extra else b"}"
        return self._head + write(choice) + b"]" + tail + b"\n\n"

    def _progress(self, progress: RequestProgress) -> bytes:
        """How a prompt gets on whose first token is not there yet."""
        record = {
            "prompt_tokens": progress.prompt_tokens,
            "processed_tokens": progress.processed_tokens,
            "cached_tokens": progress.cached_tokens,
            "eta_s": progress.eta_s,
        }
        return self._bare(progress=record)

    def _bare(self, **extra: Any) -> bytes:
        """A chunk without a choice."""
        return self._head + b"]," + encode(extra)[1:] + b"\n\n"
