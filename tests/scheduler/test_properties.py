"""Properties of scheduler, block pool and step loop under random load, through the toy executor."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import quire.engine.core as engine_module
from quire.config.speculative import SpeculativeConfig
from quire.config.structured import GrammarSettings
from quire.engine.core import EngineCore
from quire.engine.structured_output.compiler import GrammarCompiler
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.protocol.adapter import AdapterLimits, LoRARequest
from quire.protocol.output import FinishedSequence
from quire.protocol.plan import StepPlan
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from quire.protocol.structured import StructuredOutputs
from quire.scheduler.sequence import SchedulerLimits, Status, derive_seed
from tests.engine.toy import (
    InjectedError,
    ToyExecutor,
    ToyFolders,
    Windows,
    context_of,
    nearest,
    next_token,
    ranked_tokens,
)

VOCAB = 23
ENDS = (7, 20)
"""End tokens: two, so that a beam may find no other continuation. Token 0 is like any other."""
LETTERS = [chr(ord("a") + token) for token in range(VOCAB)]
"""What grammars read; those of the end tokens stand for the end."""
GRAMMAR = StructuredOutputs(regex="([abdefgi-n][l-w]{1,3}cab){1,3}")
MAX_LEN = 40
WINDOWS: tuple[Windows, ...] = ((None,), (None,), (None, 5), (3,), (9,), (None, 2, 9))


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    priority: int
    arrives: int
    aborts: int | None
    beam_width: int
    streams: bool
    tenant: str = ""
    cuts: tuple[int, ...] = ()
    """Steps before which it is cut back by a few tokens."""
    speculates: bool = True
    has_grammar: bool = False
    deadline: int | None = None
    adapter: str = ""
    """The folder of its adapter."""


FOLDERS = ("", "", "a-8", "also-a", "b-8", "c-20", "changing", "too-large", "vanished")


def digest_in(folder: str, step: int) -> str:
    """What a folder holds before a step: its rank is behind the dash."""
    if folder == "changing":
        return "before-8" if step < 5 else "after-16"
    return {"also-a": "a-8", "too-large": "x-40", "vanished": "y-8"}.get(folder, folder)


FEW_ADAPTERS = AdapterLimits(1, 24, 3, 30.0)


@dataclass(frozen=True)
class Setting:
    block_size: int
    spare_blocks: int
    """Blocks beyond what the largest request needs alone."""
    max_num_seqs: int
    budget: int
    steps_in_flight: int
    policy: str
    caching: bool
    threshold: int
    failing: frozenset[int]
    num_drafts: int = 0
    measures_drafts: bool = False
    windows: Windows = (None,)
    """Of each KV group."""
    num_stages: int = 1
    adapters: AdapterLimits = FEW_ADAPTERS
    load_polls: int = 0
    """How long adapters load."""


prefixes = st.sampled_from([(), (1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9), (5,) * 13])
prompts = st.builds(
    lambda prefix, rest: (prefix + tuple(rest))[:24] or (1,),
    prefixes,
    st.lists(st.integers(1, 4), max_size=14),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    kind = draw(st.sampled_from(["plain", "plain", "plain", "forked", "beams"]))
    has_grammar = kind != "beams" and draw(st.sampled_from([False, False, True]))
    may_be_cut = kind != "beams" and not has_grammar
    return Job(
        prompt=draw(prompts),
        max_tokens=draw(st.integers(1, 14)),
        n=draw(st.integers(2, 4)) if kind == "forked" else 1,
        priority=draw(st.integers(-2, 2)),
        arrives=draw(st.integers(0, 12)),
        aborts=draw(st.one_of(st.none(), st.none(), st.integers(0, 25))),
        beam_width=draw(st.integers(1, 3)) if kind == "beams" else 0,
        streams=draw(st.booleans()),
        tenant=draw(st.sampled_from(["", "a", "b"])),
        cuts=tuple(draw(st.lists(st.integers(1, 25), max_size=2))) if may_be_cut else (),
        speculates=draw(st.sampled_from([True, True, False])),
        has_grammar=has_grammar,
        deadline=draw(st.sampled_from([None, None, None, 40, 90])),
        adapter=draw(st.sampled_from(FOLDERS)),
    )


@st.composite
def engine_settings(draw: st.DrawFn) -> Setting:
    return Setting(
        block_size=draw(st.sampled_from([4, 8])),
        spare_blocks=draw(st.integers(0, 12)),
        max_num_seqs=draw(st.integers(3, 9)),
        budget=draw(st.integers(1, 40)),
        steps_in_flight=draw(st.sampled_from([1, 2, 4])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        caching=draw(st.booleans()),
        threshold=draw(st.sampled_from([0, 0, 5])),
        failing=draw(st.frozensets(st.integers(0, 30), max_size=2)),
        num_drafts=draw(st.sampled_from([0, 0, 1, 2, 5])),
        measures_drafts=draw(st.booleans()),
        windows=draw(st.sampled_from(WINDOWS)),
        adapters=AdapterLimits(
            draw(st.integers(1, 2)),
            24,
            draw(st.integers(1, 4)),
            draw(st.sampled_from([0.0, 10.0, 1e6])),
        ),
        load_polls=draw(st.sampled_from([0, 0, 1, 5])),
    )


def build(setting: Setting, work: list[Job]) -> EngineCore:
    limits = SchedulerLimits(
        num_blocks=1,
        block_size=setting.block_size,
        max_model_len=MAX_LEN,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.budget,
        windows=setting.windows,
        num_stages=setting.num_stages,
        policy=setting.policy,
        enable_prefix_caching=setting.caching,
        long_prefill_token_threshold=setting.threshold,
        speculation=speculation_of(setting),
        adapters=setting.adapters,
    )
    largest = max(
        limits.blocks_held(min(len(job.prompt) + job.max_tokens, MAX_LEN)) * max(job.beam_width, 1)
        for job in work
    )
    num_blocks = largest + setting.spare_blocks
    limits = replace(limits, num_blocks=num_blocks)
    executor = ToyExecutor(
        num_blocks,
        setting.block_size,
        VOCAB,
        setting.failing,
        setting.num_drafts,
        setting.windows,
        setting.num_stages,
        setting.load_polls,
    )
    executor.vanished.add("vanished")
    if limits.num_ahead:
        executor.last.repeats = lambda length: length % 7 < 2
    if setting.num_drafts > 1:
        executor.last.num_proposed = lambda length: (
            (0, length, 1, 9)[length % 4] % (setting.num_drafts + 1)
        )
    clock = iter(range(1_000_000))
    return EngineCore(
        executor,
        limits,
        setting.steps_in_flight,
        clock=lambda: next(clock),
        adapter_reader=ToyFolders(),
    )


def speculation_of(setting: Setting) -> SpeculativeConfig | None:
    if not setting.num_drafts:
        return None
    model = "drafts ahead" if setting.num_drafts == 5 else None
    method = "auto" if setting.measures_drafts else "ngram" if model is None else "draft_model"
    schedule = ((2, 3, setting.num_drafts - 1),) if setting.num_drafts == 2 else ()
    return SpeculativeConfig(method, setting.num_drafts, 1, 1, schedule, model)


@cache
def compiler() -> GrammarCompiler:
    """For all engines, since each grammar is compiled apart from the step loop."""
    backend = Tokenizer(models.BPE(dict(zip(LETTERS, range(VOCAB), strict=True)), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([LETTERS[token] for token in ENDS])
    made = GrammarCompiler(GrammarSettings())
    made.set_vocabulary(lambda: Vocabulary(backend.to_str(), VOCAB, ENDS))
    return made


def add(core: EngineCore, new: NewRequest) -> None:
    """Without waiting for its grammar."""
    wanted = new.params.structured_outputs
    if wanted is None:
        core.add(new)
        return
    compilation = compiler().compile(wanted)
    compilation.result()
    core.add(new, compilation)


def new_request(index: int, job: Job, now: float = 0.0) -> NewRequest:
    return NewRequest(
        key=index * 100,
        request_id=f"r{index}",
        prompt_token_ids=np.array(job.prompt, np.int32),
        params=SamplingParams(
            n=job.n,
            max_tokens=job.max_tokens,
            seed=index,
            speculation=job.speculates,
            structured_outputs=GRAMMAR if job.has_grammar else None,
        ),
        deadline=None if job.deadline is None else now + job.deadline,
        arrival_time=0.0,
        eos_token_ids=ENDS,
        priority=job.priority,
        streams=job.streams,
        interactive=job.streams,
        tenant=job.tenant,
        shares_prefixes=index % 4 > 0,
        beam_width=job.beam_width,
        adapter=LoRARequest(job.adapter, 1 + len(job.adapter), job.adapter)
        if job.adapter
        else None,
    )


class _Failures(logging.Handler):
    """Collects the errors that the engine recovered from."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(record.exc_info[1] if record.exc_info else None)


@contextmanager
def only_injected_failures() -> Iterator[None]:
    """The engine retries failed steps, and would hide its own mistakes that way too."""
    failures, logger = _Failures(), logging.getLogger(engine_module.__name__)
    logger.addHandler(failures)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(failures)
        logger.propagate = True
    for error in failures.errors:
        assert isinstance(error, InjectedError), f"a step failed by itself: {error!r}"


def run(setting: Setting, work: list[Job]) -> dict[int, FinishedSequence]:
    with only_injected_failures():
        return drive(build(setting, work), work)


def drive(core: EngineCore, work: list[Job]) -> dict[int, FinishedSequence]:
    """Drive the engine to the end, with an integrity check after every step."""
    ended: dict[int, FinishedSequence] = {}
    streamed: dict[int, list[int]] = {}
    aborted: dict[int, int] = {}
    """Sequences that must end soon, and since when."""

    def check_budget(plan: StepPlan) -> None:
        assert plan.num_tokens <= core.scheduler.limits.max_num_batched_tokens

    core.on_plan = check_budget
    pending = dict(enumerate(work))
    assert core.adapters is not None
    folders = core.adapters._reader
    assert isinstance(folders, ToyFolders)
    for step in range(5_000):
        folders.holds = {folder: digest_in(folder, step) for folder in FOLDERS}
        if step % 7 == 6:
            core.unload_adapter(1 + len(FOLDERS[step % len(FOLDERS)]))
        for i in [i for i, job in pending.items() if job.arrives <= step]:
            add(core, new_request(i, pending.pop(i), core.clock()))
        for i, job in enumerate(work):
            if job.aborts == step and i not in pending:
                for sequence in core.scheduler.requests.get(f"r{i}", ()):
                    aborted[sequence.key] = step
                core.abort(f"r{i}")
            if step in job.cuts:
                cut_back(core, f"r{i}", streamed, step)
        output = core.step()
        core.scheduler.check_integrity()
        check_steps_in_flight(core)
        check_windows(core)
        check_bounds(core)
        check_drafts(core)
        for key, token in zip(output.keys.tolist(), output.tokens.tolist(), strict=True):
            assert key not in ended, "no token after the end"
            streamed.setdefault(key, []).append(token)
        for sequence in output.finished:
            assert sequence.key not in ended, "one terminal output per sequence"
            ended[sequence.key] = sequence
            aborted.pop(sequence.key, None)
            job = work[sequence.key // 100]
            is_shown = job.streams and not job.beam_width
            shown = sequence.token_ids.tolist() if is_shown else []
            assert streamed.get(sequence.key, []) == shown
        assert all(step - since < core.max_steps_in_flight for since in aborted.values())
        if not pending and not core.has_work and not core.scheduler.requests:
            break
    else:
        raise AssertionError("no progress: the engine did not finish in 5,000 steps")
    assert core.death is None
    assert core.scheduler.kv.pool.num_used == 0
    check_adapters_at_rest(core)
    return ended


def check_adapters_at_rest(core: EngineCore) -> None:
    """No sequence uses an adapter, none waits for one, and hosts have no more than they may."""
    adapters, slots = core.adapters, core.scheduler.adapters
    assert adapters is not None and slots is not None
    for _ in range(50):
        core.step()  # what requests that were aborted have begun to load
    assert not adapters._used and not adapters._queue and not adapters.is_loading
    assert not any(one.num_users or one.calls for one in adapters._hosted.values())
    assert slots.residents.keys() <= adapters._hosted.keys()
    assert len(adapters._hosted) <= core.scheduler.limits.adapters.max_host_adapters
    assert isinstance(core.executor, ToyExecutor)
    assert core.executor.hosted == adapters._hosted.keys()


def cut_back(
    core: EngineCore, request_id: str, streamed: dict[int, list[int]], number: int
) -> None:
    """Take up to three tokens from each running sequence of a request, those in flight first."""
    for sequence in list(core.scheduler.requests.get(request_id, ())):
        if sequence.status is Status.RUNNING:
            num_tokens = max(sequence.num_known - number % 4, sequence.num_prompt)
            core.scheduler.cut_back(sequence, num_tokens)
            del streamed.get(sequence.key, [])[num_tokens - sequence.num_prompt :]


def check_steps_in_flight(core: EngineCore) -> None:
    """The host knows for each row how many steps that include it have not reported yet."""
    columns = core.scheduler.columns
    counts = np.zeros_like(columns.in_flight)
    for plan, _ in core._in_flight:
        counts[plan.rows[columns.epoch[plan.rows] == plan.epochs]] += 1
    held = [row for row, request in enumerate(core.scheduler.by_row) if request is not None]
    assert columns.in_flight[held].tolist() == counts[held].tolist()


def check_bounds(core: EngineCore) -> None:
    """What the host allocates, if all drafts are accepted, stays within each row's end."""
    columns, rows = core.scheduler.columns, core.scheduler.ranked_rows()
    assert (columns.num_tokens[rows] <= columns.max_total[rows]).all()
    if columns.has_windows:
        assert (columns.num_certain[rows] <= columns.num_computed[rows]).all()
        known = rows[columns.in_flight[rows] == 0]
        assert (columns.num_certain[known] == columns.num_computed[known]).all()


def check_drafts(core: EngineCore) -> None:
    """The host knows how many drafts wait in rows that have nothing in flight."""
    columns, rows = core.scheduler.columns, core.scheduler.ranked_rows()
    assert isinstance(core.executor, ToyExecutor)
    toy = core.executor.last.rows
    known = rows[(columns.in_flight[rows] == 0) & columns.has_sampled[rows]]
    for row in known.tolist():
        if not columns.host_chooses[row]:
            waiting, drafts = columns.num_waiting_drafts[row], toy[row].drafts
            assert waiting == len(drafts) or (columns.constrained[row] and waiting < len(drafts))
    assert core.metrics.draft_tokens.value <= core.executor.last.num_verified


def check_windows(core: EngineCore) -> None:
    """A sequence holds the window, what one step computes, and drafts in flight."""
    block_size = core.scheduler.limits.block_size
    drafts = core.scheduler.speculation.num_drafts * core.max_steps_in_flight
    drafts += core.scheduler.limits.num_ahead
    for request in core.scheduler.by_row:
        if request is not None and request.status is Status.RUNNING:
            for group, table in enumerate(request.tables):
                most = core.scheduler.limits.max_held_blocks(group)
                assert len(table) <= most + -(-drafts // block_size)


def reference_tokens(
    prompt: tuple[int, ...],
    max_tokens: int,
    seed: int,
    windows: Windows,
    has_grammar: bool,
    adapter: str,
) -> tuple[list[int], str]:
    """And why they end."""
    tokens, made = list(prompt), list[int]()
    while True:
        token = next_token(context_of(tokens, windows, adapter), seed, VOCAB)
        if has_grammar:
            token = nearest(token, lambda t: is_allowed(made, t), VOCAB)
        tokens.append(token)
        made.append(token)
        if token in ENDS or (has_grammar and is_text(made, "([abdefgi-n][l-w]{1,3}cab){3}")):
            return made, "stop"
        if len(made) == max_tokens or len(tokens) == MAX_LEN:
            return made, "length"


def is_text(tokens: list[int], expression: str) -> bool:
    """Whether it is a whole text without an end token."""
    text = "".join(LETTERS[token] for token in tokens)
    return not set(tokens) & set(ENDS) and re.fullmatch(expression, text) is not None


def is_allowed(made: list[int], token: int) -> bool:
    """Whether `GRAMMAR` allows the token after these, by Python's own expressions."""
    if token in ENDS:
        return is_text(made, "([abdefgi-n][l-w]{1,3}cab){1,3}")
    endings = ("", "lcab", "cab", "ab", "b")
    return any(
        is_text([*made, token, *map(LETTERS.index, end)], "([abdefgi-n][l-w]{1,3}cab){1,3}")
        for end in endings
    )


def reference_beams(
    prompt: tuple[int, ...], width: int, max_tokens: int, windows: Windows, adapter: str
) -> list[tuple[list[int], bool]]:
    """Tokens of the best hypotheses, and whether an end token ended each."""
    live, ended = [(0.0, list(prompt))], []
    for _ in range(min(max_tokens, MAX_LEN - len(prompt))):
        found = []
        for logprob, tokens in live:
            ids, values = ranked_tokens(context_of(tokens, windows, adapter), VOCAB, 2 * width)
            for token, value in zip(ids, values, strict=True):
                value = float(np.float32(value))
                if token in ENDS:
                    ended.append(((logprob + value) / len(tokens), [*tokens, token], True))
                else:
                    found.append((logprob + value, [*tokens, token]))
        live = sorted(found, key=lambda beam: -beam[0])[:width]
    ended += [(logprob / len(tokens), tokens, False) for logprob, tokens in live]
    best = sorted(ended, key=lambda beam: -beam[0])[:width]
    return [(tokens[len(prompt) :], by_end) for _, tokens, by_end in best]


def check_outputs(setting: Setting, work: list[Job]) -> None:
    """Run the work and compare every output with what its request would get alone."""
    ended = run(setting, work)
    for i, job in enumerate(work):
        for child in range(job.n):
            sequence = ended.pop(i * 100 + child)
            tokens = sequence.token_ids.tolist()
            adapter = digest_in(job.adapter, job.arrives)
            if job.adapter in ("too-large", "vanished"):
                assert sequence.finish_reason in ("error", "abort", "timeout") and not tokens
                continue
            if job.beam_width:
                if sequence.finish_reason not in ("abort", "timeout"):
                    assert sequence.beams is not None
                    found = [(beam.token_ids, beam.finished_by_eos) for beam in sequence.beams]
                    assert found == reference_beams(
                        job.prompt, job.beam_width, job.max_tokens, setting.windows, adapter
                    )
                continue
            seed = derive_seed(i, child)
            expected, reason = reference_tokens(
                job.prompt, job.max_tokens, seed, setting.windows, job.has_grammar, adapter
            )
            if sequence.finish_reason in ("abort", "timeout"):
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, sequence.finish_reason) == (expected, reason)
    assert not ended


# Beams and streams of two priorities that are preempted and return, two steps in flight.
COMING_AND_GOING = (
    Setting(
        block_size=8,
        spare_blocks=2,
        max_num_seqs=5,
        budget=8,
        steps_in_flight=2,
        policy="priority",
        caching=False,
        threshold=0,
        failing=frozenset(),
    ),
    [
        Job((3, 1, 4), 6, 1, 0, 0, None, 3, False),
        Job((3, 2, 3, 4, 3), 13, 3, -1, 9, None, 0, False),
        Job((3, 1, 4, 3, 1, 2, 1), 12, 2, -1, 4, None, 0, False),
        Job((4, 4, 4, 2, 4, 2, 1, 4, 2, 1, 3), 9, 2, -1, 9, None, 0, False),
        Job((1, 4, 2, 1, 4, 3, 3, 4), 7, 2, -1, 8, None, 0, False),
    ],
)

# After a failed step a beam comes back, and then with one plan its fork and the fork of that: the
# last must not take over a block that the same plan fills by copying.
RETURNING_TOGETHER = (
    Setting(
        block_size=4,
        spare_blocks=0,
        max_num_seqs=3,
        budget=7,
        steps_in_flight=1,
        policy="fcfs",
        caching=False,
        threshold=0,
        failing=frozenset({5}),
    ),
    [Job((3, 4, 2), 6, 1, 0, 0, None, 3, False)],
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(*COMING_AND_GOING)
@example(*RETURNING_TOGETHER)
@given(engine_settings(), st.lists(jobs(), min_size=1, max_size=9))
def test_outputs_do_not_depend_on_scheduling(setting: Setting, work: list[Job]) -> None:
    """Every request ends once, with the tokens it would get alone, whatever runs beside it.

    Turns red if a block is leaked, shared wrongly, read before it is written or after it was
    reused, if a token is lost or doubled by preemption, overlap or a failed step, or if a request
    starves. The reference knows nothing of blocks, caching or preemption.
    """
    check_outputs(setting, work)


def in_pipeline(setting: Setting, num_stages: int) -> Setting:
    """The same with several stages. At times, when memory is short, one step is in flight."""
    steps_in_flight = 1 if setting.steps_in_flight == 1 else num_stages
    return replace(setting, num_stages=num_stages, steps_in_flight=steps_in_flight, num_drafts=0)


@pytest.mark.parametrize("num_stages", [2, 3])
@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setting=engine_settings(), work=st.lists(jobs(), min_size=1, max_size=9))
def test_outputs_do_not_depend_on_stages(
    num_stages: int, setting: Setting, work: list[Job]
) -> None:
    """The same in a pipeline, whose stages each have rows of their own.

    Turns red if a token reaches a stage twice, late or never, or a stage that had carried a failed
    step out goes on from there.
    """
    check_outputs(in_pipeline(setting, num_stages), work)


def crowd(random: Random) -> tuple[Setting, list[Job]]:
    """Many forks and beams in a pool for one of them, which hypothesis comes upon too rarely."""
    setting = Setting(
        block_size=random.choice([4, 8]),
        spare_blocks=random.randint(0, 5),
        max_num_seqs=random.randint(3, 9),
        budget=random.choice([3, 6, 8, 20, 40]),
        steps_in_flight=random.choice([1, 2, 4]),
        policy=random.choice(["fcfs", "priority"]),
        caching=random.random() < 0.5,
        threshold=random.choice([0, 0, 5]),
        failing=frozenset(random.sample(range(25), random.choice([0, 1, 2]))),
        num_drafts=random.choice([0, 1, 4]),
        measures_drafts=random.random() < 0.3,
        windows=random.choice(WINDOWS),
        adapters=AdapterLimits(random.choice([1, 1, 2]), 24, random.randint(1, 4), 20.0),
        load_polls=random.choice([0, 1]),
    )
    folders = FOLDERS[: random.choice([1, 3, 7, 7])]
    work = []
    for _ in range(random.randint(2, 6)):
        kind = random.choice(["plain", "forked", "forked", "beams", "beams"])
        prefix = random.choice([(), (1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9), (5,) * 13])
        rest = [random.randint(1, 4) for _ in range(random.randint(0, 14))]
        has_grammar = kind != "beams" and random.random() < 0.3
        cuts = tuple(random.sample(range(1, 25), 2))
        work.append(
            Job(
                prompt=(*prefix, *rest)[:24] or (1,),
                max_tokens=random.randint(1, 14),
                n=random.randint(2, 4) if kind == "forked" else 1,
                priority=random.randint(-2, 2),
                arrives=random.randint(0, 12),
                aborts=random.choice([None, None, None, random.randint(0, 25)]),
                beam_width=random.randint(2, 3) if kind == "beams" else 0,
                streams=random.random() < 0.5,
                tenant=random.choice("ab"),
                cuts=() if kind == "beams" or has_grammar else cuts,
                has_grammar=has_grammar,
                adapter=random.choice(folders),
            )
        )
    return setting, work


@pytest.mark.parametrize("seed", range(10))
def test_crowds(seed: int) -> None:
    """The same property where nearly every step preempts, forks or copies."""
    random = Random(seed)
    for _ in range(40):
        check_outputs(*crowd(random))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_crowds_in_a_pipeline(num_stages: int) -> None:
    random = Random(num_stages)
    for _ in range(40):
        setting, work = crowd(random)
        check_outputs(in_pipeline(setting, num_stages), work)
