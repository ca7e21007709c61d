"""The load of the soak: clients that ask for all that a server can do, and check what they get."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from soak_exchange import (
    DoubledAnswerError,
    Exchange,
    FailedRequestError,
    LostAnswerError,
    WrongAnswerError,
    check,
    openai_chunks,
    typed_events,
)

RETRIES = 60
RETRY_S = 0.5
WORDS = (
    *("river", "bread", "copper", "lantern", "harbour", "violin", "meadow", "winter", "engine"),
    *("paper", "silver", "garden", "letter", "mountain", "kitchen", "window", "teacher", "ocean"),
)
FIXED_PROMPTS = (
    "Once upon a time there was a",
    "The three largest cities of the country are",
    "To bake bread you need",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The river runs from the mountains to",
)
PREFIX = "You are a careful assistant who answers briefly. " * 12
"""What many prompts begin with, so that blocks are shared, copied and evicted."""


@dataclass
class Tally:
    """What came of all requests so far. Clients share it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """The first ones, in words."""
    down: list[list[float]] = field(default_factory=list)
    """[from, to] of every time without an engine, by our own hand."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, outcome: str, fault: str | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            self.kinds[kind] += 1
            if fault is not None and len(self.faults) < 50:
                self.faults.append(f"{kind}: {outcome}: {fault}")

    def was_down(self, start: float, end: float) -> bool:
        """Whether the engine was away at some moment of that time."""
        with self.lock:
            return any(down <= end and start <= up for down, up in self.down)

    @property
    def num_faults(self) -> int:
        return sum(self.outcomes[name] for name in ("lost", "doubled", "wrong", "failed"))


class Requests:
    """Makes requests of every kind, and checks their answers."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._numbers = itertools.count()
        self._fixed: dict[str, Any] = {}
        self.num_grammars = 0
        self.num_compared = 0
        self.kinds: dict[Callable[[random.Random], None], int] = {
            self.stream: 16,
            self.chat_with_logprobs: 8,
            self.several: 8,
            self.beams: 4,
            self.penalties: 8,
            self.prompt_logprobs: 4,
            self.schema: 16,
            self.choice_and_regex: 6,
            self.tool: 8,
            self.offered_tool: 4,
            self.responses: 6,
            self.messages: 6,
            self.embeddings: 8,
            self.shared_prefix: 6,
            self.leave_stream: 8,
            self.leave_at_once: 4,
            self.fixed: 8,
            self.refused: 3,
            self.tokens_and_metrics: 4,
        }

    # --- text -------------------------------------------------------------------------------------

    def stream(self, chance: random.Random) -> None:
        asked = chance.randrange(4, 40)
        body = {
            **_prompt(chance),
            "max_tokens": asked,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        chunks = openai_chunks(self._exchange.stream("/v1/completions", body))
        got = sum(
            len(choice.get("token_ids") or ()) for chunk in chunks for choice in chunk["choices"]
        )
        told = chunks[-1]["usage"]["completion_tokens"]
        check(got == told == asked, f"{asked} tokens were asked for, {got} came, usage says {told}")

    def chat_with_logprobs(self, chance: random.Random) -> None:
        body = {
            **_chat(chance, "Write about"),
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": chance.randrange(4),
        }
        if chance.random() < 0.5:
            chunks = openai_chunks(self._exchange.stream("/v1/chat/completions", body))
            check(any(c["choices"][0].get("logprobs") for c in chunks), "no logprobs in a stream")
            return
        reply = self._exchange.post("/v1/chat/completions", body)
        (choice,) = reply["choices"]
        got, told = len(choice["logprobs"]["content"]), reply["usage"]["completion_tokens"]
        check(got in (told, told - 1), f"{got} logprobs for {told} tokens")

    def several(self, chance: random.Random) -> None:
        count = chance.randrange(2, 5)
        body = {**_prompt(chance), "max_tokens": 12, "n": count, "temperature": 0.9}
        if chance.random() < 0.5:
            openai_chunks(self._exchange.stream("/v1/completions", body), count)
            return
        reply = self._exchange.post("/v1/completions", body)
        places = sorted(choice["index"] for choice in reply["choices"])
        check(places == list(range(count)), f"n={count} gave choices {places}")

    def beams(self, chance: random.Random) -> None:
        count = chance.randrange(2, 4)
        body = {**_prompt(chance), "max_tokens": 8, "n": count, "use_beam_search": True}
        reply = self._exchange.post("/v1/completions", body)
        check(len(reply["choices"]) == count, f"{count} beams gave {len(reply['choices'])} choices")

    def penalties(self, chance: random.Random) -> None:
        word = chance.choice(WORDS)
        body = {
            **_prompt(chance),
            "max_tokens": 24,
            "presence_penalty": chance.uniform(-1, 1),
            "frequency_penalty": chance.uniform(0, 1),
            "repetition_penalty": 1.1,
            "temperature": 0.8,
            "top_p": 0.9,
            "min_p": 0.01,
            "seed": chance.randrange(1000),
            "logit_bias": {str(chance.randrange(1000)): -5},
            "stop": [word],
        }
        reply = self._exchange.post("/v1/completions", body)
        (choice,) = reply["choices"]
        check(word not in choice["text"], f"the stop string {word!r} is in {choice['text']!r}")

    def prompt_logprobs(self, chance: random.Random) -> None:
        body = {**_prompt(chance), "max_tokens": 1, "echo": True, "logprobs": 1}
        reply = self._exchange.post("/v1/completions", body)
        (choice,) = reply["choices"]
        got, told = len(choice["logprobs"]["tokens"]), reply["usage"]["total_tokens"]
        check(got == told, f"{got} logprobs for {told} tokens of prompt and output")

    def shared_prefix(self, chance: random.Random) -> None:
        length = chance.randrange(40, len(PREFIX))
        body = {"prompt": PREFIX[:length] + _words(chance, 20), "max_tokens": 8}
        self._exchange.post("/v1/completions", body)

    def fill_cache(self, chance: random.Random) -> None:
        """A prompt that shares nothing with others, about half as long as the context."""
        self._exchange.post("/v1/completions", {"prompt": _words(chance, 450), "max_tokens": 1})

    def fixed(self, chance: random.Random) -> None:
        self.ask_fixed(chance.choice(FIXED_PROMPTS), chance.random() < 0.5)

    def ask_fixed(self, prompt: str, streams: bool) -> None:
        """A greedy answer is the same whenever it is asked for, in one piece or in many."""
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        if streams:
            chunks = openai_chunks(self._exchange.stream("/v1/completions", body))
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        else:
            text = self._exchange.post("/v1/completions", body)["choices"][0]["text"]
        first = self._fixed.setdefault(prompt, text)
        self.num_compared += 1
        check(text == first, f"{prompt!r} at temperature 0 was {first!r}, and now is {text!r}")

    # --- schemas and tools ------------------------------------------------------------------------

    def schema(self, chance: random.Random) -> None:
        """A schema that was never seen before."""
        number = self._new_grammar()
        properties: dict[str, Any] = {
            f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 99},
            "word": {"enum": chance.sample(WORDS, 4)},
            "flag": {"type": "boolean"},
        }
        names = list(properties)
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": names}
        schema["additionalProperties"] = False
        body = {
            **_chat(chance, "Fill in a form about"),
            "max_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "form", "schema": schema},
            },
        }
        if chance.random() < 0.5:
            chunks = openai_chunks(self._exchange.stream("/v1/chat/completions", body))
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            ended = choices[-1]["finish_reason"]
        else:
            (choice,) = self._exchange.post("/v1/chat/completions", body)["choices"]
            text, ended = choice["message"]["content"], choice["finish_reason"]
        if ended == "stop":
            made = json.loads(text)
            check(list(made) == names, f"{text!r} has not the keys {names}")
            check(made["word"] in properties["word"]["enum"], f"{made['word']!r} is no choice")

    def choice_and_regex(self, chance: random.Random) -> None:
        words = [f"{word}{self._new_grammar()}" for word in chance.sample(WORDS, 3)]
        body = {**_prompt(chance), "max_tokens": 16}
        if chance.random() < 0.5:
            body["structured_outputs"] = {"choice": words}
        else:
            body["structured_outputs"] = {"regex": "|".join(words)}
        (choice,) = self._exchange.post("/v1/completions", body)["choices"]
        complete = choice["finish_reason"] != "stop" or choice["text"] in words
        check(complete, f"{choice['text']!r} is none of {words}")

    def tool(self, chance: random.Random) -> None:
        body = {
            **_chat(chance, "Look up"),
            "max_tokens": 64,
            "tools": [self._tool()],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        if chance.random() < 0.5:
            openai_chunks(self._exchange.stream("/v1/chat/completions", body))
            return
        (choice,) = self._exchange.post("/v1/chat/completions", body)["choices"]
        if choice["finish_reason"] in ("stop", "tool_calls"):
            (call,) = choice["message"]["tool_calls"]
            check(isinstance(json.loads(call["function"]["arguments"]), dict), "no arguments")

    def offered_tool(self, chance: random.Random) -> None:
        body = {**_chat(chance, "Tell me about"), "max_tokens": 24, "tools": [self._tool()]}
        openai_chunks(self._exchange.stream("/v1/chat/completions", body))

    def _tool(self) -> dict[str, Any]:
        number = self._new_grammar()
        place = {"type": "string", "maxLength": 12}
        parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
        function = {"name": f"look_up_{number}", "parameters": parameters}
        return {"type": "function", "function": function}

    def _new_grammar(self) -> int:
        self.num_grammars += 1
        return next(self._numbers)

    # --- other routes -----------------------------------------------------------------------------

    def responses(self, chance: random.Random) -> None:
        body = {"input": f"Say a word about {_words(chance, 2)}.", "max_output_tokens": 20}
        ends = ("response.completed", "response.incomplete")
        events = self._exchange.stream("/v1/responses", body)
        typed_events(events, ends, ("response.failed", "error"))

    def messages(self, chance: random.Random) -> None:
        body = {**_chat(chance, "Describe"), "max_tokens": 20}
        typed_events(self._exchange.stream("/v1/messages", body), ("message_stop",), ("error",))

    def embeddings(self, chance: random.Random) -> None:
        texts = [_words(chance, 8) for _ in range(chance.randrange(1, 4))]
        reply = self._exchange.post("/v1/embeddings", {"input": texts})
        places = [one["index"] for one in reply["data"]]
        check(places == list(range(len(texts))), f"{len(texts)} texts gave embeddings {places}")

    def tokens_and_metrics(self, chance: random.Random) -> None:
        text = _words(chance, 30)
        tokens = self._exchange.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        reply = self._exchange.post("/detokenize", {"tokens": tokens["tokens"]})
        check(reply["prompt"] == text, f"{text!r} came back as {reply['prompt']!r}")
        for path in ("/metrics", "/v1/models"):
            status, data = self._exchange.get(path)
            check(status in (200, 503), f"{path}: {status} {data[:100]!r}")

    def refused(self, chance: random.Random) -> None:
        bad: list[dict[str, Any]] = [
            {"prompt": "a", "max_tokens": -1},
            {"prompt": [2**40]},
            {"prompt": "a", "temperature": "hot"},
            {"prompt": "word " * 5000},
            {"prompt": "a", "structured_outputs": {"regex": "("}},
        ]
        reply = self._exchange.post("/v1/completions", chance.choice(bad), expected=400)
        check(bool(reply["error"]["message"]), "a refusal without words")

    def leave_stream(self, chance: random.Random) -> None:
        body = {
            **_prompt(chance),
            "max_tokens": 200,
            "ignore_eos": True,
            "n": chance.choice((1, 2)),
        }
        self._exchange.stream("/v1/completions", body, leave_after=chance.randrange(1, 12))

    def leave_at_once(self, chance: random.Random) -> None:
        body = {**_chat(chance, "Go on about"), "max_tokens": 200, "ignore_eos": True}
        self._exchange.send_and_leave("/v1/chat/completions", body)


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def _prompt(chance: random.Random) -> dict[str, Any]:
    return {"prompt": f"The {_words(chance, chance.randrange(1, 30))} is"}


def _chat(chance: random.Random, verb: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{verb} the {_words(chance, 2)}."}]}


class Clients:
    """A closed loop: each client asks, waits for the answer and asks again."""

    def __init__(self, requests: Requests, tally: Tally, count: int, seed: int) -> None:
        self._requests = requests
        self._tally = tally
        self._go = threading.Event()
        self._end = threading.Event()
        self._busy = threading.Semaphore(count)
        self._count = count
        self._threads = [
            threading.Thread(target=self._run, args=(seed + i,), name=f"client-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def go(self) -> None:
        self._go.set()

    def rest(self) -> None:
        """Returns when every client has its answer and waits."""
        self._go.clear()
        for _ in range(self._count):
            self._busy.acquire()
        for _ in range(self._count):
            self._busy.release()

    def end(self) -> None:
        self._end.set()
        self._go.set()
        for thread in self._threads:
            thread.join(10)

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        kinds, weights = zip(*self._requests.kinds.items(), strict=True)
        while not self._end.is_set():
            self._go.wait()
            with self._busy:
                if self._go.is_set() and not self._end.is_set():
                    ask(self._tally, chance.choices(kinds, weights)[0], chance, self._end)


def ask(
    tally: Tally,
    kind: Callable[[random.Random], None],
    chance: random.Random,
    end: threading.Event,
) -> None:
    """One request, tried again while the engine is away, as a client should."""
    name = kind.__name__
    for _ in range(RETRIES):
        started = time.monotonic()
        try:
            kind(chance)
        except FailedRequestError as error:
            if not tally.was_down(started, time.monotonic()):
                tally.note(name, "failed", str(error))
                return
            tally.note(name, "retried")
            if end.wait(RETRY_S):
                return
            continue
        except LostAnswerError as error:
            tally.note(name, "lost", str(error))
        except DoubledAnswerError as error:
            tally.note(name, "doubled", str(error))
        except WrongAnswerError as error:
            tally.note(name, "wrong", str(error))
        except Exception as error:
            tally.note(name, "wrong", repr(error))
        else:
            tally.note(name, "left" if name.startswith("leave") else "answered")
        return
    tally.note(name, "failed", f"no answer in {RETRIES} tries")
