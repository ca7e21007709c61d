"""`LoopRequests`: the open requests of one event loop of an `AsyncLLM`."""

from __future__ import annotations

import asyncio

from quire.frontend.engine_client import EngineClient
from quire.frontend.output_processor import OpenRequest, OutputProcessor
from quire.protocol.output import StepOutput
from quire.protocol.request import KEY_BITS
from quire.text.tokenizer import Tokenizer


class LoopRequests:
    """Belongs to the thread of its loop: other loops have their own, and share the engine only."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, index: int) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.open: dict[str, tuple[OpenRequest, asyncio.Event]] = {}
        """By the request's name in the engine; the event tells its reader of news."""
        self.index = index
        self.first_key = index << KEY_BITS
        """What is added to the keys of its sequences, so that the engine knows whose they are."""
        self._client = client

    def receive(self, output: StepOutput) -> None:
        changed, stopped = self.processor.process(output)
        for sequence in stopped:
            reason = sequence.finish_reason or "stop"
            self._client.abort(sequence.request.engine_id, reason, sequence.key)
        for request in changed:
            entry = self.open.get(request.engine_id)
            if entry is not None:
                entry[1].set()

    def engine_died(self, reason: str) -> None:
        for request, news in self.open.values():
            request.error = reason
            news.set()

    def forget(self, request: OpenRequest) -> None:
        """No reader is left for a request; it is aborted if it goes on."""
        if self.open.pop(request.engine_id, None) is None:
            return
        if not request.finished:
            self._client.abort(request.engine_id)
        self.processor.close(request)

    def abandon(self) -> None:
        """End all requests: the loop is closed, and so no reader comes back."""
        for request, _ in list(self.open.values()):
            self.forget(request)
