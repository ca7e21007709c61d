"""The engine on a GPU: the same tokens as transformers, with and without graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig, Qwen3Config

from quire import LLM, SamplingParams
from quire.protocol.plan import AddedRow, StepPlan
from quire.worker.model_runner import ModelRunner
from quire.worker.rows import RowTable
from tests.draft_heads import forget, save_agreeing_eagle3, save_agreeing_mtp
from tests.tiny import save_tiny

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "head_dim": 64,
    "eos_token_id": None,
    "bos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "first_k_dense_replace": 3,  # no experts
}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "deepseek-v2": (DeepseekV2Config, LATENT),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model. Large weights spread the logits, so that rounding rarely decides."""
    torch.manual_seed(0)
    kind, changes = CONFIGS[request.param]
    config = kind(**{**SIZES, **changes}, initializer_range=0.2)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(5, 500, int(n)).tolist() for n in rng.integers(3, 200, count)]


def generate(folder: Path, work: list[list[int]], **options: object) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=32, detokenize=False)
    settings = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64, **options}
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in work], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_match_transformers_in_float32(folder: Path) -> None:
    """Kernels, graphs and overlap change nothing: greedy tokens equal the reference's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    work = prompts(12)
    found = generate(folder, work, dtype="float32")
    for prompt, tokens in zip(work, found, strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        assert (best - chosen < 1e-2).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_half_precision_are_close(folder: Path, dtype: str) -> None:
    """Top choices agree with transformers in the same precision wherever the margin allows."""
    work = prompts(12)
    found = generate(folder, work, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).cuda()
    agree = total = 0
    for prompt, tokens in zip(work, found, strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        top = logits.topk(2).values
        clear = top[:, 0] - top[:, 1] > 0.05 * top[:, 0].abs()
        expected = logits.argmax(-1)
        agree += int((expected == torch.tensor(tokens, device="cuda"))[clear].sum())
        total += int(clear.sum())
    assert total > 50
    assert agree / total > 0.99


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"attention_backend": "torch"},
        {"max_num_batched_tokens": 48},
        {"num_gpu_blocks_override": 70, "max_model_len": 512},
        {"block_size": 4},
        {"block_size": 128},
        {"max_steps_in_flight": 1},
        {"max_steps_in_flight": 4},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_settings_do_not_change_tokens(folder: Path, options: dict[str, object]) -> None:
    """Graph or eager, chunked, preempted, any block size, any overlap: equal tokens in float32."""
    work = prompts(30)
    assert generate(folder, work, dtype="float32", **options) == generate(
        folder, work, dtype="float32"
    )


def test_reading_a_shared_prefix_once_does_not_change_tokens(folder: Path) -> None:
    """Two groups that share a prefix and requests that share nothing, with and without graphs."""
    rng = np.random.default_rng(2)
    shared = [rng.integers(5, 500, length).tolist() for length in (500, 333)]
    work = [shared[i % 2] + tail for i, tail in enumerate(prompts(44))] + prompts(4)
    plain = generate(folder, work, dtype="float32", disable_cascade_attn=True)
    for options in ({}, {"enforce_eager": True}, {"block_size": 64}):
        assert generate(folder, work, dtype="float32", **options) == plain


def test_a_row_may_have_nothing_but_what_it_shares(folder: Path) -> None:
    """The first prompt's last token is computed alone, in the step in which others that begin with
    this whole prompt join."""
    shared = np.random.default_rng(3).integers(5, 500, 480).tolist()
    work = [shared, *([*shared, 5 + i] for i in range(24))]
    settings = {"dtype": "float32", "max_num_batched_tokens": 479}
    plain = generate(folder, work, disable_cascade_attn=True, **settings)
    assert generate(folder, work, **settings) == plain


VARIETY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_k": 20, "top_p": 0.9},
    {"seed": 3, "min_p": 0.05},
    {"seed": 4, "n": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"seed": 5, "n": 2, "presence_penalty": 0.5, "min_tokens": 8, "stop_token_ids": [7, 8]},
    {"temperature": 0.0, "logprobs": 3, "logit_bias": {5: 2.0, 6: -2.0}},
    {"temperature": 0.0, "allowed_token_ids": list(range(5, 60)), "logprob_token_ids": [5, 6]},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.0, "prompt_logprob_token_ids": [5, 6]},
]


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 48}, {"num_gpu_blocks_override": 80}], ids=str
)
def test_launching_a_step_never_waits_for_the_device(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admissions, forks, chunks, preemptions and all sampling features: torch refuses any call that
    would wait. Results are waited for in one place, after the launch (`PendingStep.result`)."""
    failures: list[Exception] = []

    def guarded(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(*arguments)
            except Exception as error:
                failures.append(error)
                raise
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    settings = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 16, "max_model_len": 512}
    work = [{"prompt_token_ids": prompt} for prompt in prompts(24)]
    params = [
        SamplingParams(max_tokens=24 + i, detokenize=False, **VARIETY[i % len(VARIETY)])
        for i in range(len(work))
    ]
    with LLM(str(folder), skip_tokenizer_init=True, **{**settings, **options}) as llm:
        llm.generate(work, params, use_tqdm=False)  # kernels are compiled here
        llm.reset_prefix_cache()
        executor = llm._core.executor
        monkeypatch.setattr(executor, "execute", guarded(executor.execute))
        monkeypatch.setattr(executor, "sample", guarded(executor.sample))
        outputs = llm.generate(work, params, use_tqdm=False)
        waits = {m.name: m for m in llm.get_metrics()}["quire:step_wait_seconds"]
    assert not failures
    assert waits.count == llm._core.metrics.steps.value  # type: ignore[attr-defined]
    for output, wanted in zip(outputs, params, strict=True):
        assert len(output.outputs) == wanted.n
        assert {one.finish_reason for one in output.outputs} <= {"length", "stop"}


def logprobs_of(
    folder: Path, work: list[list[int]], **options: object
) -> list[tuple[list[int], Any]]:
    """Greedy tokens and the logits [tokens, vocab] they were chosen from, less each line's mean."""
    params = SamplingParams(temperature=0.0, max_tokens=16, detokenize=False, logprobs=-1)
    limits = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64, "max_logprobs": -1}
    with LLM(str(folder), skip_tokenizer_init=True, **{**limits, **options}) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
    found = []
    for output in outputs:
        made = output.outputs[0]
        lines = [[entries[i].logprob for i in range(512)] for entries in made.logprobs]
        centred = np.array(lines) - np.mean(lines, -1, keepdims=True)
        found.append((list(made.token_ids), centred))
    return found


def errors(found: list[Any], expected: list[Any]) -> list[float]:
    """Relative errors of logits for as long as both runs have chosen the same tokens."""
    known = []
    for (tokens, logits), (other_tokens, others) in zip(found, expected, strict=True):
        same = 0
        while same < len(tokens) and tokens[:same] == other_tokens[:same]:
            distance = np.linalg.norm(logits[same] - others[same])
            known.append(distance / np.linalg.norm(others[same]))
            same += 1
    return known


WAYS: list[dict[str, Any]] = [{}, {"enforce_eager": True}, {"max_num_seqs": 1}]


def test_logits_do_not_depend_on_the_way(folder: Path) -> None:
    """Graphs and eager steps, many requests at once and one by one: equal to transformers'."""
    work = prompts(12)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    for way in WAYS:
        for prompt, (tokens, logits) in zip(
            work, logprobs_of(folder, work, dtype="float32", **way), strict=True
        ):
            with torch.inference_mode():
                ids = torch.tensor([prompt + tokens], device="cuda")
                theirs = model(ids).logits[0, len(prompt) - 1 : -1]
            theirs = (theirs - theirs.mean(-1, keepdim=True)).cpu().numpy()
            assert np.linalg.norm(logits - theirs) / np.linalg.norm(theirs) < 1e-4


def test_no_way_rounds_more_than_another(folder: Path) -> None:
    """In bfloat16 each way is off by rounding, which these large weights make much of; none may be
    further off than the others."""
    work = prompts(12)
    exact = logprobs_of(folder, work, dtype="float32")
    noise = [
        np.median(errors(logprobs_of(folder, work, dtype="bfloat16", **way), exact)) for way in WAYS
    ]
    assert 0 < max(noise) < 1.3 * min(noise)


DRAFTED_STEPS = {
    # tokens of each row, of which all but the first are drafts; tokens of prompts beside them
    "one row": ([4], []),
    "pairs": ([2] * 17, []),
    "ragged": ([1 + i % 8 for i in range(40)], []),
    "all eight": ([8] * 40, []),
    "threes": ([3] * 23, []),
    "with a prompt": ([4] * 40, [90]),
    "with prompts, long and short": ([2, 8, 1, 5, 3] * 6, [9, 200, 3]),
}


def drafted_rows(runner: ModelRunner, counts: list[int], prompts: list[int]) -> list[list[int]]:
    """Rows with known tokens, all but the last of them computed, and drafts behind; and prompts of
    which nothing is computed. Returns all tokens of each row."""
    rng = np.random.default_rng(len(counts))
    known = [int(rng.integers(2, 250)) for _ in counts] + prompts
    lengths = [k + c - 1 for k, c in zip(known, counts, strict=False)] + prompts
    tokens = [rng.integers(5, 500, length).astype(np.int32) for length in lengths]
    size = runner.table.block_size
    blocks = [-(-length // size) for length in lengths]
    rows = np.arange(len(known), dtype=np.int32)
    order = 1 + rng.permutation(sum(blocks)).astype(np.int32)
    plan = StepPlan(
        0,
        added_rows=[
            AddedRow(row, tokens[row][: known[row]], known[row], 0, SamplingParams(), 0)
            for row in rows.tolist()
        ],
        block_rows=np.repeat(rows, blocks),
        block_groups=np.zeros(sum(blocks), np.int32),
        block_indices=np.concatenate([np.arange(n, dtype=np.int32) for n in blocks]),
        block_ids=order,
        rows=rows[: len(counts)],
        num_new_tokens=np.array(known[: len(counts)], np.int32) - 1,
        num_samples=np.zeros(len(counts), np.int32),
    )
    runner.execute(plan)
    for row, ids in enumerate(tokens):
        runner.table.token_ids[row, : len(ids)] = torch.from_numpy(ids).to(runner.table.device)
    return [ids.tolist() for ids in tokens]


def launched(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    """The lines of logits of a step whose launch must not wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.execute(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runner._executed is not None
    return runner._executed.logits.float().clone()


def expected_lines(
    model: torch.nn.Module, rows: list[list[int]], num_samples: list[int]
) -> torch.Tensor:
    """Of each row the last lines, as transformers computes them."""
    lines = []
    for tokens, count in zip(rows, num_samples, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens], device=model.device)).logits[0]
        lines.append(logits[len(tokens) - count :])
    return torch.cat(lines)


def test_graphs_cover_steps_that_verify_drafts(folder: Path) -> None:
    """Rows of 1 to 8 tokens, few and many, alone and beside prompts: a replay gives the lines that
    the step gives without graphs, and that transformers does. Where the tokens are known, as those
    that a grammar forces, an engine without speculation has a graph too."""
    from quire.worker.graphs import StepGraphs

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    limits = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64, "dtype": "float32"}
    with LLM(str(folder), skip_tokenizer_init=True, **limits) as llm:
        runner = llm._core.executor.runner
        captured = runner.graphs
        with_drafts = StepGraphs(
            runner.model, runner.attention, runner.table, 64, 1024, max_queries=8
        )
        with_drafts.capture(with_drafts.keys)
        for name, (counts, prompts) in DRAFTED_STEPS.items():
            rows = drafted_rows(runner, counts, prompts)
            drafted, forced = [*counts, *(1 for _ in prompts)], [1] * len(rows)
            before = runner.table.num_computed.clone()
            for graphs, num_samples in (with_drafts, drafted), (None, drafted), (captured, forced):
                plan = StepPlan(
                    1,
                    rows=np.arange(len(rows), dtype=np.int32),
                    num_new_tokens=np.array([*counts, *prompts], np.int32),
                    num_samples=np.array(num_samples, np.int32),
                )
                expected = expected_lines(model, rows, num_samples)
                runner.table.num_computed.copy_(before)
                runner.graphs = graphs
                runner.execute(plan)  # what is compiled is compiled here
                runner.table.num_computed.copy_(before)
                found = launched(runner, plan)
                assert runner._executed is not None
                assert (runner._executed.hidden is None) == (graphs is not None), name
                assert found.shape == expected.shape
                error = (found - expected).norm(dim=1) / expected.norm(dim=1)
                assert float(error.max()) < 5e-4, f"{name}: {float(error.max()):.1e}"
                after = runner.table.num_computed[: len(rows)] - before[: len(rows)]
                assert after.tolist() == plan.num_new_tokens.tolist()
            runner.graphs = captured
            runner.update_rows(StepPlan(2, freed_rows=np.arange(len(rows), dtype=np.int32)))


class KnownTexts:
    """A drafter that knows the texts, and gets every fifth token wrong."""

    def __init__(self, table: RowTable, texts: list[list[int]], num_drafts: int) -> None:
        self.table, self.texts, self.num_drafts = table, texts, num_drafts
        self.num_accepted = 0

    def settle(self, plan: StepPlan) -> None:
        """Nothing is kept of rows."""

    def update(self, plan: StepPlan) -> None:
        """The table has all that it needs."""

    def accepted(self, rows: torch.Tensor, counts: torch.Tensor | None) -> None:
        if counts is not None:
            self.num_accepted += int(counts.sum()) - len(counts)

    def propose(self, rows: torch.Tensor) -> torch.Tensor:
        drafts = np.full((len(rows), self.num_drafts), -1, np.int32)
        for i, row in enumerate(rows.tolist()):
            known = self.table.token_ids[row, : int(self.table.num_tokens[row])].tolist()
            # Rows of requests that have ended may have more than their text.
            text = next((text for text in self.texts if text[: len(known)] == known), known)
            for j, token in enumerate(text[len(known) : len(known) + self.num_drafts]):
                drafts[i, j] = token if (len(known) + j) % 5 else 3
        return torch.from_numpy(drafts).to(rows.device)


def generate_with_drafts(
    llm: LLM, work: list[list[int]], texts: list[list[int]], num_drafts: int
) -> tuple[list[list[int]], int]:
    """Greedy tokens, and how many of them were accepted drafts."""
    runner = llm._core.executor.runner
    drafter = runner.drafter = KnownTexts(runner.table, texts, num_drafts)
    llm._core.scheduler.speculation.num_drafts = num_drafts
    llm.reset_prefix_cache()
    greedy = SamplingParams(temperature=0.0, max_tokens=32, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in work], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], drafter.num_accepted


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"block_size": 4}], ids=str)
def test_drafts_do_not_change_tokens(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was started for drafts, with graphs and without: many rows at once, while
    others join and end."""
    work = prompts(60)
    plain = generate(folder, work, dtype="float32")
    texts = [prompt + tokens for prompt, tokens in zip(work, plain, strict=True)]
    limits = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 40, "dtype": "float32"}
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, **options}
    with LLM(str(folder), skip_tokenizer_init=True, **limits, **options) as llm:
        graphs, replayed = llm._core.executor.runner.graphs, []
        if graphs is not None:
            replay = graphs.replay

            def run(plan: StepPlan, *others: Any) -> torch.Tensor | None:
                logits = replay(plan, *others)
                if plan.has_drafts:
                    replayed.append(logits is not None)
                return logits

            monkeypatch.setattr(graphs, "replay", run)
        found, num_accepted = generate_with_drafts(llm, work, texts, 4)
    assert found == plain
    assert num_accepted > 1000
    if "enforce_eager" not in options:  # prompts that join may make a step too large for any graph
        assert len(replayed) > 10 and np.mean(replayed) > 0.8


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"block_size": 32}], ids=str)
def test_heads_draft_without_waiting(
    tmp_path: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside graphs, which leave the target's streams for them, and without."""
    folder, head = tmp_path / "target", tmp_path / "head"
    folder.mkdir()
    config: dict[str, Any] = {"num_speculative_tokens": 3}
    if kind == "eagle3":
        config["model"] = str(head)
        target = save_tiny(folder, num_hidden_layers=6, hidden_size=256, head_dim=64)
        save_agreeing_eagle3(head, target)
        forget(folder)
    else:
        save_agreeing_mtp(folder, "glm4_moe", hidden_size=256, head_dim=64)
    rng = np.random.default_rng(1)
    work = [rng.integers(5, 150, int(n)).tolist() for n in rng.integers(3, 120, 40)]
    limits: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 24, **options}
    plain = generate(folder, work, **limits)
    sample = ModelRunner.sample

    def sample_at_once(runner: ModelRunner, *masks: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return sample(runner, *masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with LLM(
        str(folder),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 28,
        speculative_config=config,
        **limits,
    ) as llm:
        monkeypatch.setattr(ModelRunner, "sample", sample_at_once)
        greedy = SamplingParams(temperature=0.0, max_tokens=32, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in work], greedy, use_tqdm=False)
        accepted = llm._core.metrics.accepted_tokens.value
        share = accepted / llm._core.metrics.draft_tokens.value
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    assert share > (0.3 if kind == "eagle3" else 0.8)


def test_without_speculation_no_graph_is_for_drafts_alone(folder: Path) -> None:
    """Steps of many rows with a few tokens each have graphs always, steps of nothing but drafts
    where they are asked for."""
    with LLM(str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 28) as llm:
        keys = [key for key in llm._core.executor.runner.graphs.keys if hasattr(key, "queries")]
    assert {key.queries for key in keys} == {1, 8}
    assert all(key.num_prompts for key in keys) and len(keys) == 18
