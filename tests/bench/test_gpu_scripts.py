"""The scripts in `benchmarks/` that measure a GPU, as far as a machine without one can tell.

`tests/kernels/gpu/test_benchmark_cases.py` checks the kernel cases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quire.config.quantization import read_quantization
from quire.files.json_file import CheckedValues
from quire.metrics.instruments import Histogram
from tests.bench.conftest import CONFIG

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
SCRIPTS = (
    "gpu.py",
    "gpu_adapters.py",
    "gpu_speculation.py",
    "kernels.py",
    "profile_step.py",
    "quantized_candidates.py",
    "sampling.py",
)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts as modules, named as they name each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu
    import gpu_adapters
    import gpu_speculation
    import harness
    import profile_step
    import step_report

    return SimpleNamespace(
        gpu=gpu,
        gpu_adapters=gpu_adapters,
        gpu_speculation=gpu_speculation,
        harness=harness,
        profile_step=profile_step,
        step_report=step_report,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_refusal(script: str) -> None:
    """Help answers anywhere; without a GPU nothing is measured, and the message says why."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FOLDER / script), *words]
        environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    helped = run("--help")
    assert helped.returncode == 0 and f"benchmarks/{script}" in helped.stdout
    refused = run()
    assert refused.returncode == 1 and not refused.stdout
    assert refused.stderr.startswith(f"{script}: needs a GPU, and torch ")


@pytest.mark.parametrize(
    ("name", "count", "inputs", "outputs", "checksum"),
    [
        ("w1", 256, 145_331, 145_866, 2_971_927_259),
        ("w2", 256, 524_288, 8_192, 10_742_481_182),
        ("w3", 1, 512, 256, 10_154_269),
        ("w4", 256, 540_672, 16_384, 10_915_838_977),
        ("w5", 1024, 131_072, 262_144, 2_681_211_752),
    ],
)
def test_workloads_are_those_that_vllm_ran(
    scripts: SimpleNamespace, name: str, count: int, inputs: int, outputs: int, checksum: int
) -> None:
    """The figures quoted for vLLM are for these very requests; a changed draw would void them."""
    requests = scripts.gpu.WORKLOADS[name].requests()
    assert len(requests) == count
    assert sum(len(request.prompt) for request in requests) == inputs
    assert sum(request.num_outputs for request in requests) == outputs
    assert sum(sum(request.prompt) for request in requests) == checksum
    shared = {tuple(request.prompt[:2048]) for request in requests}
    assert len(shared) == (1 if name in ("w3", "w4") else count)


def test_host_time_is_that_of_one_round(scripts: SimpleNamespace) -> None:
    """Steps before the round do not count, however slow they were."""
    histogram = Histogram("x", "x", (0.001, 0.002, 0.005, 0.01))
    for _ in range(10):
        histogram.observe(0.5)
    before = histogram.read()
    for seconds in [0.0005] * 60 + [0.0015] * 39 + [0.004]:
        histogram.observe(seconds)
    host = scripts.gpu.HostTime.between(before, histogram.read())
    assert host.steps == 100
    assert host.mean == pytest.approx((60 * 0.0005 + 39 * 0.0015 + 0.004) / 100)
    assert (host.p50, host.p99, host.worst) == (0.001, 0.002, 0.005)


def test_table_row_has_target_and_peer(scripts: SimpleNamespace) -> None:
    host = {"steps": 9, "mean": 0.0004, "p50": 0.0005, "p99": 0.002, "worst": 0.005}
    figures = {
        "workload": "w5",
        "seconds": 11.5,
        "output_tokens_per_s": 262_144 / 11.5,
        "ms_per_output_token": 11_500 / 262_144,
        "host": {"schedule and apply": host, "launch": {**host, "mean": 0.0003, "worst": 0.01}},
    }
    row = scripts.gpu.row("llama-8b", figures)
    assert row[1:3] == ["11.50 s", "22,795"]
    assert row[4:] == ["12 s", "15.2-15.9 s", "0.40 / 0.5 / 2 / 5", "0.30 / 0.5 / 2 / 10"]
    assert scripts.gpu.row("qwen3-0.6b", {**figures, "workload": "w2"})[4:6] == ["", ""]


def test_shapes_weigh_what_they_should(scripts: SimpleNamespace) -> None:
    """Eight billion parameters less the 525 million of the embedding, two bytes each."""
    llama = scripts.harness.SHAPES["llama-8b"]
    assert llama.linear_bytes == 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    assert llama.kv_bytes_per_token == 32 * 2 * 1024 * 2


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("_gemv_kernel", "linear layers"),
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT", "linear layers"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>()", "linear layers"),
        ("product_kernel", "linear layers"),
        ("_finish_product_kernel", "linear layers"),
        ("stream_kernel", "linear layers"),
        ("_round_kernel", "linear layers"),
        ("_scaled_tile_kernel", "linear layers"),
        ("_decode_kernel", "attention"),
        ("_prefix_kernel", "attention"),
        ("_latent_kernel", "attention"),
        ("_expanded_kernel", "attention"),
        ("_latent_cache_kernel", "rotation and cache write"),
        ("_gate_vectors_kernel", "experts"),
        ("_sum_vectors_kernel", "experts"),
        ("_tile_kernel", "experts"),
        ("_grouped_tile_kernel", "experts"),
        ("_sum_kernel", "experts"),
        ("_route_kernel", "routing"),
        ("_merge_kernel", "merge of splits"),
        ("_rms_norm_kernel", "norm"),
        ("_rotary_cache_kernel", "rotation and cache write"),
        ("_silu_and_mul_kernel", "activation"),
        ("void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>()", "sampling"),
        ("_gather_decode_kernel", "embedding, rows and copies"),
        ("_choose_kernel", "sampling"),
        ("_embedding_kernel", "embedding, rows and copies"),
        ("_append_kernel", "embedding, rows and copies"),
        ("Memcpy DtoH (Device -> Pinned)", "embedding, rows and copies"),
        ("void at::native::elementwise_kernel<clamp>()", "other"),
    ],
)
def test_kernels_are_sorted_by_kind(scripts: SimpleNamespace, kernel: str, kind: str) -> None:
    assert scripts.step_report.kind_of(kernel) == kind
    times = scripts.step_report.gpu_by_kind({kernel: {"us": 3.0, "launches": 1.0}}, step_us=10.0)
    assert times[kind] == 3.0 and times["no kernel runs"] == 7.0 and sum(times.values()) == 10.0


def test_floor_of_a_step(scripts: SimpleNamespace) -> None:
    """Weights are read once, or multiplied with if that takes longer; cached tokens are read."""
    shape = scripts.harness.SHAPES["llama-8b"]
    slow_memory = SimpleNamespace(read_bytes_per_s=1e12, matmul_flops_per_s=1e18)
    floor = scripts.step_report.Floor.of(shape, 4, 1000.0, slow_memory)
    assert floor.linear_us == pytest.approx(shape.linear_bytes / 1e6)
    assert floor.attention_us == pytest.approx(131.072)
    slow_units = SimpleNamespace(read_bytes_per_s=1e18, matmul_flops_per_s=1e12)
    floor = scripts.step_report.Floor.of(shape, 4, 0.0, slow_units)
    assert floor.linear_us == pytest.approx(4 * shape.linear_bytes / 1e6)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("fp8", 8.03), ("fp8block", 8.03), ("gptq", 4.65), ("awq", 4.71)]
)
def test_quantized_shapes(scripts: SimpleNamespace, name: str, gigabytes: float) -> None:
    """Their configurations are those of checkpoints, and their head has 16 bits."""
    shape = scripts.harness.QUANTIZED_SHAPES[f"llama-8b-{name}"]
    assert shape.linear_bytes == pytest.approx(1e9 * gigabytes, rel=0.01)
    config = CheckedValues(Path("config.json"), shape.config())
    quantized = read_quantization(config, None)
    assert quantized is not None and quantized.format_of("model.layers.0.mlp.up_proj", None)
    slow_units = SimpleNamespace(read_bytes_per_s=1e18, matmul_flops_per_s=1e12)
    llama = scripts.harness.SHAPES["llama-8b"]
    times = [scripts.step_report.Floor.of(o, 4, 0.0, slow_units).linear_us for o in (llama, shape)]
    head = 2 * 4 * llama.vocab * llama.hidden / 1e6
    share = 0.5 if name.startswith("fp8") else 1.0
    assert times[1] - head == pytest.approx(share * (times[0] - head))


def test_floor_of_mixtures(scripts: SimpleNamespace) -> None:
    """All weights less the embedding and norms, where each expert is used; 576 numbers of a latent;
    of the experts, those that were counted."""
    shapes = scripts.harness.SPARSE_SHAPES
    qwen, lite = shapes["qwen3-30b-a3b"], shapes["deepseek-v2-lite"]
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    experts = 48 * 128 * qwen.expert_weights
    assert qwen.linear_bytes == 2 * (30_532_122_624 - 151_936 * 2048 - norms - experts)
    norms = 27 * (2 * 2048 + 512) + 2048
    experts = 26 * 64 * lite.expert_weights
    assert lite.linear_bytes == 2 * (15_706_484_224 - 102_400 * 2048 - norms - experts)
    assert lite.kv_bytes_per_token == 27 * 2 * 576
    slow_memory = SimpleNamespace(read_bytes_per_s=1e12, matmul_flops_per_s=1e18)
    floor = scripts.step_report.Floor.of(lite, 4, 1000.0, slow_memory, 21.5)
    assert floor.expert_us == pytest.approx(26 * 21.5 * 2 * 3 * 2048 * 1408 / 1e6)
    assert floor.attention_us == pytest.approx(27 * 2 * 576 * 1000 / 1e6)
    assert floor.total_us == pytest.approx(sum(vars(floor).values()))
    slow_units = SimpleNamespace(read_bytes_per_s=1e18, matmul_flops_per_s=1e12)
    floor = scripts.step_report.Floor.of(qwen, 5, 0.0, slow_units, 40.0)
    assert floor.expert_us == pytest.approx(48 * 2 * 5 * 8 * 3 * 2048 * 768 / 1e6)


def test_decode_steps_of_a_mixture(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU: a single token uses its own experts, several use more, and both count."""
    from quire import LLM

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(scripts.profile_step, "PROMPT_TOKENS", 20)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config = {**sizes, **experts, **names, "num_key_value_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 50_000}))
    shape = scripts.harness.SPARSE_SHAPES["qwen3-30b-a3b"]
    ceilings = SimpleNamespace(read_bytes_per_s=1e12, matmul_flops_per_s=1e15)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256}
    with LLM(str(tmp_path), **options) as llm:
        steps = [scripts.profile_step.decode_figures(llm, shape, size, ceilings) for size in (1, 4)]
        assert not llm._core.has_work and llm._core.on_plan is None
    assert steps[0]["experts_used"] == 2 and 2 < steps[1]["experts_used"] <= 8
    for step in steps:
        assert step["ratio"] == pytest.approx(step["step_us"] / sum(step["floor"].values()))
    assert "| 1 x " in scripts.gpu.decode_table(steps)


def test_profile_of_a_batch(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU, with no kernels to see: phases fill the step, functions are named, and the engine
    is as it was afterwards."""
    from quire import LLM
    from quire.worker.model_runner import PendingStep

    profile_step: ModuleType = scripts.profile_step
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profile_step, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(profile_step, "gpu_time", lambda batch: {"_decode_kernel": fake_kernel})
    fake_kernel = {"us": 1.0, "launches": 2.0}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 50_000}))
    ceilings = SimpleNamespace(read_bytes_per_s=1e12, matmul_flops_per_s=1e15)
    shape = scripts.harness.SHAPES["qwen3-0.6b"]
    result = PendingStep.result
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True) as llm:
        steps: list[dict[str, Any]] = [
            profile_step.profile_batch(llm, shape, size, ceilings) for size in (1, 3)
        ]
        assert not llm._core.has_work and llm._core.on_plan is None
        assert "schedule" not in vars(llm._core.scheduler)
    assert PendingStep.result is result
    assert [step["batch"] for step in steps] == [1, 3]
    for step in steps:
        assert 20 < step["context"] < 40 and step["launches"] == 2
        assert all(us > 0 for us in step["host_us"].values())
        assert len(step["host_functions_us"]) == profile_step.NUM_FUNCTIONS
    assert "| attention | 1 (" in scripts.step_report.gpu_table(steps)
    assert "| apply |" in scripts.step_report.host_table(steps)
    assert scripts.step_report.other_kernels(steps) == []


def test_drafts_are_right_as_often_as_the_drafter_is_told(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU: tokens per step follow from the acceptance, and turns leave nothing behind."""
    from quire import LLM

    script: ModuleType = scripts.gpu_speculation
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(script, "CONTEXT", 20)
    monkeypatch.setattr(script, "MAX_LEN", 160)
    monkeypatch.setattr(script, "AUTO_STEPS", 8)
    monkeypatch.setattr(script, "STREAM_TOKENS", 60)
    monkeypatch.setattr(script.Rows, "launches", lambda rows: {"launched": 1.0})
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 50_000}))
    config = {"method": "auto", "num_speculative_tokens": 4}
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 160}
    with LLM(str(tmp_path), speculative_config=config, **options) as llm:
        modes = script.Modes(llm, 50_000)
        ways = [modes.plain(), *(modes.told("ngram", 4, share) for share in (0.0, 0.8, 1.0))]
        found = script.in_turns(modes, ways, 2, 12, 1)
        tokens = [found[way.name][0][1] / 2 for way in ways]
        assert tokens[0] == tokens[1] == 1.0 and tokens[3] == 5.0
        assert 2.0 < tokens[2] < 4.8
        figures = script.losses(modes, 2, 4, 1)
        assert set(figures) == {"auto, 4 drafts, 0% right", "auto, no drafts", "launches"}
        assert "ngram, 3 drafts, 0% right" in script.verification(modes, 1, 4, 1)
        assert "auto, 4 drafts, 80% right" in script.stream(modes, 4, 1)
        assert not llm._core.has_work and llm._core.on_plan is None


def test_adapters_are_used_and_swapped(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """On a CPU: all are there, in turns, and each that is swapped in was in host memory alone."""
    from quire import LLM

    script: ModuleType = scripts.gpu_adapters
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made = script.write_adapters(tmp_path, CONFIG, 5, 8)
    requests = [script.Request([5 + i] * 9, 3) for i in range(6)]
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 160}
    with LLM(str(tmp_path), enable_lora=True, max_loras=3, max_lora_rank=8, **options) as llm:
        metrics = llm._core.metrics.adapters
        assert script.seconds(llm, requests) > 0 and not metrics.device_queries.value
        assert script.seconds(llm, requests, made[:3]) > 0
        assert metrics.device_queries.value == 6 * script.ROUNDS
        hits = metrics.device_hits.value
        found = script.swap(llm, made[3:], 60)
        assert found["longest_step_s"] > 0 and metrics.device_hits.value == hits
        assert script.placing(llm, 0) > 0
        assert not llm._core.has_work
