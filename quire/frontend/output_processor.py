"""`OutputProcessor`: gathers what the engine reports into the outputs that callers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from quire.frontend.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FlatLogprobs,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from quire.frontend.pooling import PoolingParams
from quire.protocol.adapter import LoRARequest
from quire.protocol.errors import EngineDeadError, OverloadedError, QuireError, RequestError
from quire.protocol.output import FinishedSequence, RequestProgress, StepOutput
from quire.protocol.plan import Float32Array, LogprobArrays
from quire.protocol.request import NewRequest
from quire.protocol.sampling import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class LazyLogprobs:
    """Logprobs of a prompt as the engine gave them. There may be hundreds of thousands: they
    become objects when they are looked at, on whichever thread."""

    entry: Callable[[LogprobArrays, int], dict[int, Logprob]]
    start: int
    """The first position that was asked for."""
    count: int
    parts: list[LogprobArrays] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        """One for each position; None where nothing was asked for or is known."""
        places = {
            position: (arrays, line)
            for arrays in self.parts
            for line, position in enumerate(arrays.index.tolist())
        }
        for position in range(self.count):
            place = places.get(position) if position >= self.start else None
            yield None if place is None else self.entry(*place)


@dataclass(slots=True, eq=False)
class OpenSequence:
    """One sequence that may still grow."""

    key: int
    index: int
    request: OpenRequest
    token_ids: list[int] = field(default_factory=list)
    detokenizer: IncrementalDetokenizer | None = None
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ended: bool = False
    """The engine has confirmed the end. A stop string is found here before it is."""
    embedding: Float32Array | None = None
    """Of a pooling request, as the engine gave it."""
    num_decoded: int = 0
    """Tokens whose text is made."""
    num_read: int = 0
    """Tokens that earlier outputs showed."""
    end_read: bool = False

    def append(self, token: int) -> None:
        """Take one streamed token and look for a reason to stop that the engine cannot see."""
        self.token_ids.append(token)
        if self.detokenizer is not None and self.request.params.stop_strings:
            stop = self._decode(self.detokenizer)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        detection = self.request.params.repetition_detection
        if (
            detection is not None
            and self.finish_reason is None
            and repeats(self.token_ids, detection)
        ):
            self.finish_reason = "repetition"

    def finish(self, ended: FinishedSequence) -> None:
        self.ended = True
        if self.finish_reason is not None:
            return  # what came after the stop is not part of the output
        self.embedding = ended.embedding
        self.token_ids += ended.token_ids[len(self.token_ids) :].tolist()
        self.finish_reason = ended.finish_reason
        self.stop_reason = ended.error or ended.stop_reason

    def _decode(self, detokenizer: IncrementalDetokenizer) -> str | None:
        """Make the text of new tokens. Returns the stop string that ends it, if any."""
        new, self.num_decoded = self.token_ids[self.num_decoded :], len(self.token_ids)
        return detokenizer.append(new)

    @property
    def has_unread(self) -> bool:
        return len(self.token_ids) > self.num_read or (self.ended and not self.end_read)

    def read(self, delta: bool) -> CompletionOutput:
        """An output with everything so far, or with what is new since the last one."""
        first = self.num_read if delta else 0
        text = ""
        if self.detokenizer is not None:
            self._decode(self.detokenizer)
            if self.ended:
                self.detokenizer.finish()
            text = self.detokenizer.delta(self.ended) if delta else self.detokenizer.text
        self.num_read, self.end_read = len(self.token_ids), self.ended
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self._reason_shown if self.ended else None,
            stop_reason=self.stop_reason if self.ended else None,
            lora_request=self.request.adapter,
        )

    @property
    def _reason_shown(self) -> str | None:
        """A prompt that never began, beside others that did, was aborted."""
        never_began = self.finish_reason in ("timeout", "overloaded")
        return "abort" if never_began else self.finish_reason


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request between its arrival and its last output."""

    engine_id: str
    """Its name in the engine."""
    request_id: str
    """Its name for its caller."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: RequestOutputKind
    adapter: LoRARequest | None = None
    sequences: list[OpenSequence] = field(default_factory=list)
    prompt_logprobs: LazyLogprobs | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int | None = None
    hides_cached_tokens: bool = False
    """Whether its caller must not learn how many there were."""
    error: str | None = None
    is_own_fault: bool = False
    """Whether the error lies in what was asked for."""
    progress: RequestProgress | None = None
    """That of a prompt that waits or is being computed, until it is read."""

    @property
    def finished(self) -> bool:
        return all(sequence.ended for sequence in self.sequences)

    @property
    def timed_out(self) -> bool:
        """Whether its time was over before the first token."""
        return all(sequence.finish_reason == "timeout" for sequence in self.sequences)

    @property
    def was_displaced(self) -> bool:
        """Whether it had to leave the queue."""
        return any(sequence.finish_reason == "overloaded" for sequence in self.sequences)

    @property
    def has_output(self) -> bool:
        """Whether an output now would tell the reader something it has not seen."""
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return self.finished
        interval = self.params.stream_interval or 1
        return self.finished or any(
            len(s.token_ids) - s.num_read >= interval or (s.num_read == 0 and s.token_ids)
            for s in self.sequences
        )

    def read(self, lazily: bool = False) -> RequestOutput:
        """`lazily`: the logprobs of the prompt become objects when they are looked at."""
        delta = self.kind is RequestOutputKind.DELTA
        shown = [s for s in self.sequences if not delta or s.has_unread]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._read_prompt_logprobs(lazily),
            outputs=[sequence.read(delta) for sequence in shown],
            finished=self.finished,
            metrics=self.metrics,
            lora_request=self.adapter,
            num_cached_tokens=self.num_cached_tokens_shown,
        )

    @property
    def num_cached_tokens_shown(self) -> int | None:
        return 0 if self.hides_cached_tokens else self.num_cached_tokens

    def read_beams(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Of a beam search that has ended."""
        sequences = []
        for beam in self.sequences:
            assert beam.cumulative_logprob is not None
            tokens = self.prompt_token_ids + beam.token_ids
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    lora_request=self.adapter,
                    cum_logprob=beam.cumulative_logprob,
                    text=tokenizer.decode(tokens) if tokenizer else None,
                    finish_reason="stop" if beam.finish_reason == "stop" else "length",
                )
            )
        return BeamSearchOutput(sequences)

    def read_embedding(self, params: PoolingParams, death: str | None) -> EmbeddingRequestOutput:
        """Of a pooling request that has ended; raises where there is no vector."""
        (sequence,) = self.sequences
        if sequence.embedding is None:
            raise self.failure(death)
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            outputs=EmbeddingOutput(params.finish(sequence.embedding).tolist()),
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached_tokens_shown or 0,
        )

    def failure(self, death: str | None) -> QuireError:
        """What to raise for it. The engine, unless `death` says why it died, goes on."""
        error = self.error or f"the request ended by {self.sequences[0].finish_reason}"
        if self.is_own_fault:
            return RequestError(error)
        if death is None:
            return OverloadedError(error)
        return EngineDeadError(f"the engine failed: {error}")

    def _read_prompt_logprobs(self, lazily: bool) -> PromptLogprobs | LazyLogprobs | None:
        """One entry per prompt token, None for the first, which nothing predicts."""
        if self.prompt_logprobs is None or lazily:
            return self.prompt_logprobs
        flat: PromptLogprobs = FlatLogprobs() if self.params.flat_logprobs else []
        flat.extend(self.prompt_logprobs)
        return flat


class OutputProcessor:
    """All open requests of one client."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._by_key: dict[int, OpenSequence] = {}
        self._decoded: dict[int, str] = {}

    def open(
        self,
        new: NewRequest,
        prompt: str | None,
        kind: RequestOutputKind,
        name: str | None = None,
    ) -> OpenRequest:
        """Listen for a request, which its caller knows by `name`, or as the engine does."""
        params = new.params
        ids = new.prompt_token_ids.tolist()
        known_as = name or new.request_id
        request = OpenRequest(new.request_id, known_as, prompt, ids, params, kind, new.adapter)
        request.metrics.arrival_time = new.arrival_time
        request.hides_cached_tokens = new.shares_prefixes
        if params.wants_prompt_logprobs:
            ranked = params.prompt_logprob_token_ids is None
            start = max(params.prompt_logprob_start or 0, 1)
            request.prompt_logprobs = LazyLogprobs(
                partial(self._entry, ranked=ranked), start, len(ids)
            )
        for index in range(params.n):
            sequence = self._open_sequence(request, new.key + index, index)
            if params.wants_logprobs:
                sequence.logprobs = FlatLogprobs() if params.flat_logprobs else []
                sequence.cumulative_logprob = 0.0
            request.sequences.append(sequence)
            self._by_key[sequence.key] = sequence
        return request

    def _open_sequence(self, request: OpenRequest, key: int, index: int) -> OpenSequence:
        sequence = OpenSequence(key, index, request)
        params = request.params
        if params.detokenize and self.tokenizer is not None:
            ids = request.prompt_token_ids
            sequence.detokenizer = IncrementalDetokenizer(self.tokenizer.streams, ids, params)
        return sequence

    def close(self, request: OpenRequest) -> None:
        """Stop listening for a request, ended or not."""
        for sequence in request.sequences:
            self._by_key.pop(sequence.key, None)

    def fail_all(self, reason: str) -> list[OpenRequest]:
        """End every open request with an error: the engine's reports may not reach them any more.
        Returns those requests."""
        open_sequences, self._by_key = self._by_key, {}
        failed: dict[int, OpenRequest] = {}
        for sequence in open_sequences.values():
            sequence.ended = True
            sequence.finish_reason, sequence.stop_reason = "error", reason
            sequence.request.error = sequence.request.error or reason
            failed[id(sequence.request)] = sequence.request
        return list(failed.values())

    def process(self, output: StepOutput) -> tuple[list[OpenRequest], list[OpenSequence]]:
        """Take a step's report in. Returns requests that changed and sequences to stop."""
        touched: dict[int, OpenRequest] = {}
        stopped: list[OpenSequence] = []
        for part in output.prompt_logprobs:
            sequence = self._by_key.get(part.key)
            if sequence is not None and sequence.request.prompt_logprobs is not None:
                sequence.request.prompt_logprobs.parts.append(part.arrays)
        for one in output.progress:
            sequence = self._by_key.get(one.key)
            if sequence is not None:
                sequence.request.progress = one
                touched[id(sequence.request)] = sequence.request
        arrays = output.logprobs
        lines = {} if arrays is None else {i: n for n, i in enumerate(arrays.index.tolist())}
        for i, (key, token) in enumerate(
            zip(output.keys.tolist(), output.tokens.tolist(), strict=True)
        ):
            sequence = self._by_key.get(key)
            if sequence is None or sequence.finish_reason is not None:
                continue
            if sequence.logprobs is not None and arrays is not None and i in lines:
                self._add_logprobs(sequence, arrays, lines[i])
            sequence.append(token)
            touched[id(sequence.request)] = sequence.request
            if sequence.finish_reason is not None:
                stopped.append(sequence)
        for ended in output.finished:
            sequence = self._by_key.pop(ended.key, None)
            if sequence is not None:
                self._finish(sequence, ended)
                touched[id(sequence.request)] = sequence.request
        return list(touched.values()), stopped

    def _finish(self, sequence: OpenSequence, ended: FinishedSequence) -> None:
        request = sequence.request
        sequence.finish(ended)
        if ended.beams:
            request.sequences = self._beams(request, ended)
        request.error = request.error or ended.error
        request.is_own_fault |= ended.is_own_fault
        if sequence.index == 0:
            request.num_cached_tokens = ended.num_cached_tokens
        request.metrics.first_scheduled_time = ended.first_scheduled_time
        request.metrics.first_token_time = ended.first_token_time
        request.metrics.finished_time = ended.finished_time

    def _beams(self, request: OpenRequest, ended: FinishedSequence) -> list[OpenSequence]:
        """The hypotheses of a search, best first, in the place of the sequence that led it."""
        found = []
        for index, beam in enumerate(ended.beams or ()):
            sequence = self._open_sequence(request, ended.key, index)
            hides_eos = beam.finished_by_eos and not request.params.include_stop_str_in_output
            sequence.token_ids = beam.token_ids[:-1] if hides_eos else list(beam.token_ids)
            sequence.cumulative_logprob = beam.cumulative_logprob
            sequence.finish_reason = "stop" if beam.finished_by_eos else ended.finish_reason
            sequence.ended = True
            found.append(sequence)
        return found

    def _add_logprobs(self, sequence: OpenSequence, arrays: LogprobArrays, line: int) -> None:
        assert sequence.logprobs is not None and sequence.cumulative_logprob is not None
        ranked = sequence.request.params.logprob_token_ids is None
        sequence.logprobs.append(self._entry(arrays, line, ranked))
        sequence.cumulative_logprob += float(arrays.logprobs[line, 0])

    def _entry(self, arrays: LogprobArrays, line: int, ranked: bool) -> dict[int, Logprob]:
        """Token -> logprob at one position: the token itself first, then the candidates."""
        ids, values = arrays.token_ids[line].tolist(), arrays.logprobs[line].tolist()
        entry = {ids[0]: Logprob(values[0], int(arrays.ranks[line]), self._text(ids[0]))}
        for rank, (token, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
            if token >= 0 and token not in entry:
                entry[token] = Logprob(value, rank if ranked else None, self._text(token))
        return entry

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        if token not in self._decoded:
            self._decoded[token] = self.tokenizer.decode([token])
        return self._decoded[token]


def repeats(token_ids: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tail is one pattern of an allowed size, `min_count` times in a row."""
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        span = size * params.min_count
        if span > len(token_ids):
            return False
        if token_ids[-1] != token_ids[-1 - size]:
            continue
        tail = token_ids[-span:]
        if tail == tail[:size] * params.min_count:
            return True
    return False
