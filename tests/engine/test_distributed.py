"""Ranks in processes of their own: the same tokens as one process, and what happens when one of
them dies, stands still or never gets to the end of a step."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.config.device import core_shares
from quire.engine.executors import distributed, launch, rank
from quire.engine.executors.distributed import DistributedExecutor
from quire.protocol.errors import EngineDeadError, OptionError, RankMissing
from quire.protocol.messages import ErrorRecord
from quire.protocol.plan import TokenMasks
from quire.protocol.ranks import RankFailed
from tests.models.reference import FAMILIES, random_tokens
from tests.tiny import save_tiny

pytestmark = pytest.mark.slow

SMALL: Any = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 128,
    "block_size": 4,
    "skip_tokenizer_init": True,
}
NOTICED_S = 5.0
"""A rank that dies or stands still is noticed within this time, in a step and between two. The step
itself would not end for `distributed_timeout_seconds`, ten minutes."""


def prompts(count: int, length: int = 24) -> list[dict[str, list[int]]]:
    """Half of each is the same in all."""
    shared = random_tokens(length // 2, seed=0)
    return [
        {"prompt_token_ids": shared + random_tokens(length // 2 + i, seed=i + 1)}
        for i in range(count)
    ]


def rank_pids() -> list[int]:
    """Processes of ranks that this one has started."""
    found = subprocess.run(
        ["pgrep", "-f", "-P", str(os.getpid()), "quire.engine.executors.rank"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(pid) for pid in found.stdout.split()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def everything(llm: LLM) -> list[Any]:
    """Tokens and logprobs of requests of many kinds, some of which are preempted."""
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    kinds = [
        greedy,
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2, seed=1),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, max_tokens=16, seed=7, n=2),
        SamplingParams(
            temperature=0.7,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            max_tokens=10,
            seed=3,
            min_tokens=4,
        ),
    ]
    found: list[Any] = []
    for output in llm.generate(prompts(12), [kinds[i % 4] for i in range(12)], use_tqdm=False):
        for one in output.outputs:
            found.append(list(one.token_ids))
            found += [sorted(step) for step in one.logprobs or []]
        found += [sorted(step) for step in output.prompt_logprobs or [] if step]
    again = llm.generate(prompts(12), greedy, use_tqdm=False)
    found += [list(output.outputs[0].token_ids) for output in again]
    beams = llm.beam_search(prompts(2), BeamSearchParams(beam_width=3, max_tokens=6))
    found += [list(sequence.tokens) for output in beams for sequence in output.sequences]
    return found


def made(folder: Path, **changes: Any) -> list[list[int]]:
    options: Any = {"model": str(folder), **SMALL, "num_gpu_blocks_override": 200, **changes}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(**options) as llm:
        outputs = llm.generate(prompts(4), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts."""
    monkeypatch.setattr(launch, "share_memory", lambda device: False)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_ranks_and_stages(family: str, tmp_path: Path) -> None:
    """Two ranks of two stages through shared memory: layers, heads and vocabulary are parts."""
    save_tiny(tmp_path, family)
    assert made(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2) == made(tmp_path)


@pytest.mark.usefixtures("by_gloo")
@pytest.mark.parametrize("family", FAMILIES)
def test_families_by_gloo(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    expected = made(tmp_path)
    assert made(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2) == expected
    assert made(tmp_path, tensor_parallel_size=2) == expected


@pytest.mark.usefixtures("by_gloo")
@pytest.mark.parametrize(
    ("family", "feature"),
    [
        ("qwen2_moe", {"enable_expert_parallel": True}),
        ("gpt_oss", {"enable_expert_parallel": True}),
        ("deepseek_v3", {"enable_expert_parallel": True}),
        ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
    ids=["experts", "experts-with-biases", "latent-and-experts", "drafts"],
)
def test_features_by_gloo(family: str, feature: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    assert made(tmp_path, tensor_parallel_size=2, **feature) == made(tmp_path)


def test_packed_weights_by_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of two parts are the same bits, whichever way they pass. One process would round other
    activations."""
    save_tiny(tmp_path, "llama", hidden_size=128, intermediate_size=192)
    changes: Any = {"tensor_parallel_size": 2, "quantization": "int8", "dtype": "auto"}
    expected = made(tmp_path, **changes)
    monkeypatch.setattr(launch, "share_memory", lambda device: False)
    assert made(tmp_path, **changes) == expected


@pytest.mark.parametrize(
    ("family", "tp", "pp", "way"),
    [
        ("llama", 2, 1, "memory"),
        ("llama", 3, 1, "memory"),
        ("llama", 1, 2, "memory"),
        ("llama", 2, 2, "memory"),
        ("llama", 3, 1, "gloo"),
        ("llama", 1, 2, "gloo"),
        ("llama", 2, 2, "gloo"),
        ("qwen2_moe", 3, 1, "memory"),
        ("deepseek_v3", 2, 2, "memory"),
        ("gpt_oss", 2, 2, "memory"),
        ("gemma3", 3, 1, "memory"),
    ],
)
def test_everything_under_pressure(
    family: str, tp: int, pp: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few blocks that sequences are preempted; three ranks leave one with padding. Experts
    are whole on one of the ranks. Models with windows have three block tables."""
    if way == "gloo":
        monkeypatch.setattr(launch, "share_memory", lambda device: False)
    save_tiny(tmp_path, family)
    options: Any = {"model": str(tmp_path), **SMALL, "num_gpu_blocks_override": 45}
    if family in ("gpt_oss", "gemma3"):
        options |= {"max_model_len": 64, "num_gpu_blocks_override": 76}
    options |= {"max_num_seqs": 8, "enable_expert_parallel": True}
    with LLM(**options) as one:
        expected = everything(one)
    with LLM(**options, tensor_parallel_size=tp, pipeline_parallel_size=pp) as several:
        found = everything(several)
        assert several._core.check_integrity() == 0
        statistics = several.statistics()
        assert statistics.num_preemptions > 2 and statistics.hit_rate > 0
    assert found == expected


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_grammars_and_embeddings(tp: int, pp: int, tmp_path: Path) -> None:
    """Masks reach the rank that samples, beside requests without a grammar; vectors come from the
    last stage."""
    save_tiny(tmp_path, "qwen3")
    options: Any = {"model": str(tmp_path), **SMALL, "num_gpu_blocks_override": 200}
    options["skip_tokenizer_init"] = False
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    kinds = [
        SamplingParams(temperature=0, max_tokens=30, structured_outputs={"json": schema}),
        SamplingParams(temperature=0, max_tokens=12, structured_outputs={"choice": ["one", "two"]}),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(
            temperature=1, seed=3, max_tokens=9, structured_outputs={"regex": "[0-9]{5}"}
        ),
    ]

    def found(llm: LLM) -> tuple[list[Any], list[list[float]]]:
        outputs = llm.generate(prompts(8), [kinds[i % 4] for i in range(8)], use_tqdm=False)
        vectors = llm.embed(prompts(3), use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert json.loads(outputs[0].outputs[0].text)["a"] in ("x", "yy")
        assert outputs[1].outputs[0].text in ("one", "two")
        return tokens, [one.outputs.embedding for one in vectors]

    with LLM(**options) as one:
        expected = found(one)
    with LLM(**options, tensor_parallel_size=tp, pipeline_parallel_size=pp) as several:
        tokens, vectors = found(several)
    assert tokens == expected[0]
    np.testing.assert_allclose(vectors, expected[1], atol=1e-4)


@pytest.mark.parametrize(("tp", "pp", "way"), [(2, 1, "memory"), (2, 2, "gloo")])
async def test_streams_of_an_event_loop(
    tp: int, pp: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`AsyncLLM` with ranks: a request is aborted, others go on; then a rank dies, and each open
    stream ends with an error that names it."""
    if way == "gloo":
        monkeypatch.setattr(launch, "share_memory", lambda device: False)
    save_tiny(tmp_path, "llama", max_position_embeddings=100_000)
    options: Any = {"model": str(tmp_path), **SMALL, "max_model_len": 50_000}
    options["num_gpu_blocks_override"] = 13_000
    llm = AsyncLLM(**options, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    try:
        long = SamplingParams(temperature=0, max_tokens=45_000, ignore_eos=True)
        short = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        given: Any = prompts(4)

        async def tokens(index: int, params: SamplingParams, name: str) -> list[int]:
            async for output in llm.generate(given[index], params, request_id=name):
                made = list(output.outputs[0].token_ids)
                if name == "aborted" and len(made) > 3:
                    await llm.abort(name)
            return made

        expected = await tokens(1, short, "alone")
        aborted, beside = await asyncio.gather(
            tokens(0, long, "aborted"), tokens(1, short, "beside")
        )
        assert beside == expected and 3 < len(aborted) < 45_000
        pids = rank_pids()
        streams = [asyncio.ensure_future(tokens(i, long, f"long {i}")) for i in range(4)]
        await tokens(1, short, "begun")
        os.kill(pids[1], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=rf"rank 1 .*process {pids[1]}.*SIGKILL"):
                await asyncio.wait_for(stream, NOTICED_S)
    finally:
        llm.shutdown()
    assert rank_pids() == []


def test_start_up_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What each rank has: the first stage has two of three layers, and so room for half as many
    blocks as the second."""
    save_tiny(tmp_path, "llama", num_hidden_layers=3, tie_word_embeddings=False)
    caplog.set_level("INFO", "quire")
    cache: Any = {"kv_cache_memory_bytes": "3MiB"}
    with LLM(model=str(tmp_path), **SMALL, **cache, pipeline_parallel_size=2) as llm:
        config, num_blocks = llm.model_config, llm._core.scheduler.limits.num_blocks
    (line,) = re.findall(r"ranks: (.*)", caplog.text)
    places, weights, caches, blocks, phases = line.split("; ")
    layer = 2 * 4 * SMALL["block_size"] * config.num_kv_heads * config.head_dim
    rooms = [int(room) for room in re.findall(r"\d+", blocks)]
    assert places == "2 on this host" and phases.startswith("start ")
    assert rooms == [num_blocks, rooms[1], num_blocks] and rooms[1] // rooms[0] == 2
    in_mib = [f"{num_blocks * count * layer / 2**20:.1f}" for count in (2, 1)]
    assert caches == f"KV cache {', '.join(in_mib)} MiB"
    size = (tmp_path / "model.safetensors").stat().st_size / 2**20
    assert sum(map(float, re.findall(r"[\d.]+", weights))) == pytest.approx(size, abs=0.15)


# --- failures -----------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[LLM]:
    save_tiny(tmp_path, "llama", max_position_embeddings=100_000)
    options = {**SMALL, "max_model_len": 50_000, "num_gpu_blocks_override": 13_000}
    llm = LLM(model=str(tmp_path), **options, tensor_parallel_size=2)
    yield llm
    llm.shutdown()
    assert rank_pids() == []


def endless(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=45_000, ignore_eos=True)
    llm.generate(prompts(1), params, use_tqdm=False)


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "not been heard of for")]
)
def test_rank_that_dies_or_stands_still(two: LLM, number: signal.Signals, says: str) -> None:
    """In the middle of a request: an error that names the rank, and no process is left."""
    pids = rank_pids()
    assert len(pids) == 2
    pool = ThreadPoolExecutor(1)
    call = pool.submit(endless, two)
    pool.shutdown(wait=False)
    wait_for(lambda: two.statistics().num_steps > 10, "the first steps")
    os.kill(pids[1], number)
    error = call.exception(NOTICED_S)
    assert isinstance(error, EngineDeadError)
    assert re.search(rf"rank 1 \(host \S+, process {pids[1]}\).*{says}", str(error))
    wait_for(lambda: gone(pids), "the end of all ranks")
    with pytest.raises(EngineDeadError, match=says):
        endless(two)


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "not been heard of for")]
)
def test_rank_that_is_lost_while_an_order_is_written(
    two: LLM, number: signal.Signals, says: str
) -> None:
    """Masks of 1,024 rows of a large vocabulary are more than the ring holds: the thread that
    writes them must not wait for a reader that is gone."""
    pids, executor = rank_pids(), cast(Any, two._core.executor)
    os.kill(pids[1], number)
    pool = ThreadPoolExecutor(1)
    lines = np.arange(1024, dtype=np.int32)
    masks = TokenMasks(lines, np.zeros((len(lines), 4750), np.int32))
    call = pool.submit(executor.sample, 0, masks)
    pool.shutdown(wait=False)
    error = call.exception(6 * NOTICED_S)  # it would be ten minutes
    assert isinstance(error, EngineDeadError)
    assert re.search(rf"^rank 1 \(host \S+, process {pids[1]}\).*{says}", str(error))


def test_silence_is_noticed_within_5_s(two: LLM) -> None:
    """By a clock of this test: one that stands still would take as long to wait for."""
    executor: Any = two._core.executor
    with executor._receiving:  # so that no heartbeat comes in between
        heard = min(executor._heard.values())
        executor._look(heard + distributed.SILENCE_S)
        assert executor.failure is None
        assert distributed.SILENCE_S >= 4 * rank.HEARTBEAT_S, "a busy rank is not taken for dead"
        executor._look(heard + 5.0 - 2 * distributed.LOOK_S)  # the latest look before that
        assert re.search(r"rank \d \(host .* has not been heard of for", executor.failure)
    with pytest.raises(EngineDeadError, match="has not been heard of"):
        endless(two)


def test_rank_that_is_missed_by_others(two: LLM) -> None:
    """By its silence it is the cause, whichever of the others says first that one is missing."""
    executor: Any = two._core.executor
    with executor._receiving:
        executor._heard[1] -= 2 * distributed.SILENCE_S
        missing = RankMissing("one of rank 1, rank 2 did not take part in all_reduce")
        executor._take(0, RankFailed(ErrorRecord.of(missing)))
        assert re.match(r"rank 1 \(host .* has not been heard of for", executor.failure)


HANGING = """
import dataclasses, time
from quire.engine.executors import rank as program
join, obey = program.join, program.RankLoop._obey

def join_shortly(start, options, device):
    return join(start, dataclasses.replace(options, distributed_timeout_seconds=3), device)

def obey_or_hang(loop, order):
    if type(order).__name__ == "Execute" and order.plan.step == 10 and loop._start.rank == 1:
        time.sleep(60)
    return obey(loop, order)

program.join, program.RankLoop._obey = join_shortly, obey_or_hang
"""


def test_rank_that_hangs_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its heart beats: those that wait for it know which it is, and say so before the engine
    gives up."""
    save_tiny(tmp_path, "llama")
    program = launch.PROGRAM.replace("from quire.engine", f"exec({HANGING!r}); from quire.engine")
    monkeypatch.setattr(launch, "PROGRAM", program)
    with LLM(model=str(tmp_path), **SMALL, tensor_parallel_size=2) as llm:
        executor: Any = llm._core.executor
        executor._timeout_s = 1.0
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        with pytest.raises(EngineDeadError, match=r"failed: rank 0 \(.*: rank 1 did not take part"):
            llm.generate(prompts(1), params, use_tqdm=False)


def test_rank_that_dies_between_requests(two: LLM) -> None:
    pids, executor = rank_pids(), two._core.executor
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: executor.failure is not None, "the news", NOTICED_S)
    with pytest.raises(EngineDeadError, match=r"rank 0 .*SIGKILL"):
        endless(two)
    wait_for(lambda: gone(pids), "the end of all ranks")


def test_step_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose step takes longer than a step may."""
    save_tiny(tmp_path, "llama", max_position_embeddings=100_000)
    options = {**SMALL, "max_model_len": 60_000, "num_gpu_blocks_override": 15_000}
    options["max_num_batched_tokens"] = 60_000
    with LLM(model=str(tmp_path), **options, tensor_parallel_size=2) as llm:
        executor: Any = llm._core.executor
        executor._timeout_s = 0.5  # a start-up takes longer
        monkeypatch.setattr(distributed, "LATER_S", 0.0)
        prompt = {"prompt_token_ids": random_tokens(50_000, seed=1)}
        ranks = ", ".join(rf"rank {rank} \(host \S+, process \d+\)" for rank in (0, 1))
        says = rf"failed: {ranks} did not end a step within 0\.5 s \(distributed_timeout_seconds\)"
        with pytest.raises(EngineDeadError, match=says):
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("phase", ["join", "load", "profile", "allocate", "capture"])
def test_phase_that_does_not_end(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank stands still in a phase of the start: an error names both, and no process is left."""
    save_tiny(tmp_path, "llama")
    do = DistributedExecutor._phase
    pids: list[int] = []

    def stop_first(executor: DistributedExecutor, name: str, **arguments: Any) -> list[Any]:
        if name == phase:
            pids.extend(rank_pids())
            os.kill(pids[1], signal.SIGSTOP)
            executor._timeout_s = 1.5
        return do(executor, name, **arguments)

    monkeypatch.setattr(DistributedExecutor, "_phase", stop_first)
    monkeypatch.setattr(distributed, "LATER_S", 0.0)
    monkeypatch.setattr(distributed, "SILENCE_S", 1.0)
    says = rf"^rank 1 \(host \S+, process \d+\) did not finish '{phase}' within 1\.5 s"
    with pytest.raises(EngineDeadError, match=says):
        LLM(model=str(tmp_path), **SMALL, tensor_parallel_size=2)
    assert len(pids) == 2 and gone(pids)


def test_results_of_forgotten_steps_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine recovers from a failure of its own while a step is in flight, whose result comes
    nevertheless."""
    save_tiny(tmp_path, "llama")
    options: Any = {"model": str(tmp_path), **SMALL, "num_gpu_blocks_override": 200}
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(**options, pipeline_parallel_size=2) as llm:
        expected = [list(o.outputs[0].token_ids) for o in llm.generate(prompts(4), greedy)]
        fill, num_calls = llm._core.grammars.masks, 0

        def fill_or_fail(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls in (7, 8, 15):
                raise RuntimeError("no masks")
            return fill(*arguments)

        monkeypatch.setattr(llm._core.grammars, "masks", fill_or_fail)
        found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts(4), greedy)]
    assert found == expected and num_calls > 15


def test_ranks_keep_to_cores_of_their_own(two: LLM) -> None:
    """Where there is one for each; else the system moves them."""
    everything = os.sched_getaffinity(0)
    wanted = [set(share) or everything for share in core_shares(2)]
    assert [os.sched_getaffinity(pid) for pid in sorted(rank_pids())] == wanted


def test_ranks_end_with_the_object(tmp_path: Path) -> None:
    """A script that drops its `LLM` to make room for another."""
    save_tiny(tmp_path, "llama")
    llm = LLM(model=str(tmp_path), tensor_parallel_size=2, **SMALL)
    assert len(rank_pids()) == 2
    del llm
    gc.collect()
    assert rank_pids() == []
    assert "quire-ranks" not in {thread.name for thread in threading.enumerate()}


def test_ranks_die_with_the_engine(tmp_path: Path) -> None:
    """Even where that is killed and has forked. The script has no `if __name__` guard."""
    save_tiny(tmp_path, "llama")
    script = tmp_path / "script.py"
    script.write_text(
        "from quire import LLM, SamplingParams\n"
        f"llm = LLM(model={str(tmp_path)!r}, tensor_parallel_size=2, **{SMALL!r})\n"
        "prompt = {'prompt_token_ids': [1, 2, 3]}\n"
        "llm.generate([prompt], SamplingParams(max_tokens=3), use_tqdm=False)\n"
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    time.sleep(20)  # with all that the engine has open\n"
        "    os._exit(0)\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    found = subprocess.run(
        ["pgrep", "-f", "-P", str(process.pid), "quire.engine.executors.rank"],
        capture_output=True,
        text=True,
        check=True,
    )
    pids = [int(pid) for pid in found.stdout.split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    wait_for(lambda: gone(pids), "the end of the ranks", timeout_s=10)


def test_fork_leaves_the_ranks_alone(tmp_path: Path) -> None:
    """A child that drops its copy of the `LLM`, as the collector may at any time."""
    save_tiny(tmp_path, "llama")
    with LLM(model=str(tmp_path), tensor_parallel_size=2, **SMALL) as llm:
        pid = os.fork()
        if pid == 0:
            llm.shutdown()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        assert llm.generate(prompts(1), params, use_tqdm=False)[0].finished


def test_refusals_of_a_rank_reach_the_user(tmp_path: Path) -> None:
    """What one process would refuse, several refuse in the same words."""
    save_tiny(tmp_path, "llama")
    options: Any = {"model": str(tmp_path), **SMALL, "num_gpu_blocks_override": 3}
    with pytest.raises(OptionError) as alone:
        LLM(**options)
    with pytest.raises(OptionError) as together:
        LLM(**options, tensor_parallel_size=2)
    assert str(alone.value).split(".")[0] == str(together.value).split(".")[0]
    assert rank_pids() == []


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
