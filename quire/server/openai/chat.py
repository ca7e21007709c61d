"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request

from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.errors import RequestError
from quire.server.http.reply import printable
from quire.server.openai.choices import ChoicesBody, ChoicesReply, finish_reason, stop_reason
from quire.server.openai.logprobs import Candidates, chat_logprobs
from quire.server.preparation.bodies import ConversationBody
from quire.server.preparation.prepare import Preparation, Prepared
from quire.server.routes import prepared_route
from quire.text.deltas import CallDelta, Delta, Message, ReasoningDelta
from quire.text.message_stream import MessageFormat, MessageStream
from quire.text.tool_calls.declared import ToolUse, chat_tools

router = APIRouter()


class ChatBody(ChoicesBody, ConversationBody):
    prepared_fields: ClassVar[frozenset[str]] = ConversationBody.prepared_fields | {
        *("messages", "documents", "tools", "tool_choice", "response_format"),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = True

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs) or self.logprob_token_ids is not None

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse.read(chat_tools(self.tools), self.tool_choice, self.parallel_tool_calls)

    def chat_messages(self) -> list[dict[str, Any]]:
        return self.messages

    def own_params(self) -> dict[str, Any]:
        return {"logprobs": self.num_logprobs(self.wants_logprobs, self.top_logprobs)}

    def template_settings(self) -> dict[str, Any]:
        kwargs = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        continues, generates = bool(self.continue_final_message), self.add_generation_prompt
        return {
            "template_kwargs": {name: value for name, value in kwargs.items() if value is not None},
            "add_generation_prompt": not continues if generates is None else generates,
            "continue_final_message": continues,
        }

    def kept_for_reply(self) -> dict[str, Any]:
        """With the role of the last message, which a reply that continues it has too."""
        return {**super().kept_for_reply(), "messages": [{"role": self.messages[-1]["role"]}]}

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} has no effect without logprobs; set "
                "logprobs=true."
            )
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(f"top_logprobs must be at least 0, got {self.top_logprobs}.")


@prepared_route(router, "/v1/chat/completions", ChatBody, Preparation.prepare_messages)
async def create_chat_completion(made: Prepared, request: Request) -> ChatReply:
    body: ChatBody = made.body
    response_id = f"chatcmpl-{body.request_id or request.state.request_id}"
    return ChatReply(body, response_id, made.model, made.format)


class ChatReply(ChoicesReply):
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, response_id: str, model: str, format: MessageFormat) -> None:
        super().__init__(body, response_id, model)
        self._body = body
        self._format = format
        self._streams: dict[int, MessageStream] = {}
        """By choice: where the parsing of its text stands."""
        self._is_plain = not (body.wants_logprobs or body.return_token_ids)
        self._candidates = Candidates(body.top_logprobs or 0, body.logprob_token_ids)
        self._has_begun = False

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self._count(0, output)
        choices = [{"index": one.index, **self._message(one)} for one in output.outputs]
        return self._whole(choices) | self._about_prompt(output)

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            told["prompt_logprobs"] = list(output.prompt_logprobs)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        return told

    def _message(self, one: CompletionOutput) -> dict[str, Any]:
        if self._format.is_plain:
            message = {"role": self._role, "content": one.text, "refusal": None}
            return {"message": message, **self._details(one, finish_reason(one.finish_reason))}
        parsed = self._format.parse(one.text)
        message = whole_message(parsed, self._role, self._body.include_reasoning is not False)
        reason = finish_reason(one.finish_reason, bool(parsed.calls))
        return {"message": message, **self._details(one, reason)}

    def _begins(self, index: int, output: RequestOutput) -> bool:
        return not self._has_begun

    def _chunks(self, index: int, output: RequestOutput) -> bytes:
        self._has_begun = True
        return self._opening(output) + super()._chunks(index, output)

    def _opening(self, output: RequestOutput) -> bytes:
        """The role of each choice, before its text."""
        about_prompt = self._about_prompt(output)
        silent = {"logprobs": None, "finish_reason": None}
        delta = {"role": self._role, "content": ""}
        return b"".join(
            self._choice_chunk({"index": index, "delta": delta, **silent}, **about_prompt)
            for index in range(self._body.n or 1)
        )

    def _chunk(self, index: int, output: RequestOutput, one: CompletionOutput) -> bytes:
        if not self._format.is_plain:
            return self._parsed_chunks(one)
        if self._is_plain and not self._continuous and one.finish_reason is None:
            return self._text(one.index, one.text, b'"delta":{"content":', b"}")
        details = self._details(one, finish_reason(one.finish_reason))
        return self._choice_chunk({"index": one.index, "delta": {"content": one.text}, **details})

    def _parsed_chunks(self, one: CompletionOutput) -> bytes:
        """A chunk for each thing that new text says; none while it may say several things."""
        stream = self._streams.setdefault(one.index, self._format.open())
        ends = one.finish_reason is not None
        found = stream.finish(one.text) if ends else stream.feed(one.text)
        deltas = [
            delta_record(delta)
            for delta in found
            if self._body.include_reasoning is not False or not isinstance(delta, ReasoningDelta)
        ]
        *early, last = deltas or [{}]
        silent = {"logprobs": None, "finish_reason": None}
        data = [self._choice_chunk({"index": one.index, "delta": d, **silent}) for d in early]
        if last or ends or not self._is_plain or self._continuous:
            details = self._details(one, finish_reason(one.finish_reason, stream.has_calls))
            data.append(self._choice_chunk({"index": one.index, "delta": last, **details}))
        return b"".join(data)

    def _details(self, one: CompletionOutput, finish_reason: str | None) -> dict[str, Any]:
        """What a choice says in addition to its text."""
        details: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason(one),
        }
        if self._body.wants_logprobs and one.logprobs is not None:
            details["logprobs"] = chat_logprobs(
                one.token_ids,
                list(one.logprobs),  # type: ignore[arg-type]
                self._candidates,
                bool(self._body.return_tokens_as_token_ids),
            )
        if self._body.return_token_ids:
            details["token_ids"] = one.token_ids
        return details

    @property
    def _role(self) -> str:
        """The role that speaks on: a continued message keeps its own."""
        if self._body.continue_final_message:
            return printable(str(self._body.messages[-1]["role"]))
        return "assistant"


def whole_message(parsed: Message, role: str, with_reasoning: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": role,
        "content": parsed.content or None,
        "refusal": None,
    }
    if parsed.reasoning and with_reasoning:
        message["reasoning"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
    elif not parsed.reasoning:
        message["content"] = parsed.content
    return message


def delta_record(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ReasoningDelta):
        return {"reasoning": delta.text}
    if not isinstance(delta, CallDelta):
        return {"content": delta.text}
    call: dict[str, Any] = {"index": delta.index}
    function = {"arguments": delta.arguments}
    if delta.name is not None:
        call |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, **function}
    return {"tool_calls": [{**call, "function": function}]}
