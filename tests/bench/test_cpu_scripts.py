"""`benchmarks/cpu.py`: its parts on small inputs, and one whole run next to transformers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.config.model import load_model_config
from tests.models.reference import random_tokens, reference_logits
from tests.tiny import ascii_tokenizer, save_tiny

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"

FAKE_PEER = """
import os
IMPORTS_TORCH = False

class Peer:
    version = "1.2"

    def __init__(self, options):
        print("a library talks", flush=True)
        os.system("echo another one does")
        if "refuse" in options["model"]:
            raise ValueError("no such model\\nmore about it")

    def generate(self, requests):
        if requests[0][0][0] == 666:
            print("the last words", flush=True)
            os._exit(3)
        missing = 1 if requests[0][0][0] == 13 else 0
        return [[sum(ids)] * (count - missing) for ids, count in requests]

    def forget(self):
        pass
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts as modules, named as they name each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import cpu
    import cpu_comparison
    import cpu_model
    import cpu_report
    import cpu_systems

    return SimpleNamespace(
        main=cpu.main,
        comparison=cpu_comparison,
        model=cpu_model,
        report=cpu_report,
        systems=cpu_systems,
    )


@pytest.fixture
def workers(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Any]:
    """Starts workers of a peer that only pretends to compute."""
    shutil.copy(FOLDER / "cpu_peers" / "worker.py", tmp_path)
    (tmp_path / "peer_fake.py").write_text(FAKE_PEER)
    systems = scripts.systems
    monkeypatch.setattr(systems, "PEERS", tmp_path)
    monkeypatch.setitem(systems.SYSTEMS, "fake", systems.System("fake", "gguf"))
    started = []

    def start(model: str = "model") -> Any:
        started.append(systems.Worker("fake", sys.executable, model, tmp_path / "log"))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.mark.parametrize("script", ["cpu.py", "perplexity.py"])
def test_help_and_refusal(script: str) -> None:
    """Help answers anywhere; without data nothing is measured, and the message says what to do."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FOLDER / script), *words]
        environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    helped = run("--help")
    assert helped.returncode == 0 and f"benchmarks/{script}" in helped.stdout
    refused = run()
    assert refused.returncode == 1 and not refused.stdout
    assert refused.stderr.startswith(f"{script}: give --") and "QUIRE_TEST_DATA" in refused.stderr


def test_every_system_has_its_peer(scripts: SimpleNamespace) -> None:
    for name, system in scripts.systems.SYSTEMS.items():
        assert name.startswith(f"{system.peer}-")
        assert (FOLDER / "cpu_peers" / f"peer_{system.peer}.py").is_file()
        assert system.peer in scripts.systems.PACKAGES


def test_peers_are_named_with_their_interpreters(scripts: SimpleNamespace) -> None:
    found = scripts.systems.pythons(["vllm=/a/python", "openvino-convert=/b/python"])
    assert found["vllm"] == "/a/python" and found["openvino-convert"] == "/b/python"
    assert found["transformers"] == sys.executable
    for wrong in ("vllm", "vlm=/a/python", "vllm="):
        with pytest.raises(SystemExit, match=f"--peer {wrong!r} must be NAME=PYTHON"):
            scripts.systems.pythons([wrong])


def test_a_worker_answers_and_sleeps_between_requests(workers: Any) -> None:
    """What libraries print does not get between the answers; an idle worker cannot compute."""

    def wait_until_stopped() -> None:
        os.waitid(os.P_PID, worker._process.pid, os.WSTOPPED)

    worker = workers()
    assert worker.version == "1.2" and worker.start_s > 0
    assert worker.first_token_memory_bytes > 1_000_000
    wait_until_stopped()
    for requests in ([([1, 2], 3), ([4], 1)], [([5], 2)]):
        answer = worker.generate(requests)
        assert answer["outputs"] == [[sum(ids)] * count for ids, count in requests]
        assert answer["seconds"] > 0 and answer["memory_bytes"] > 1_000_000
        wait_until_stopped()
    worker.close()
    assert worker._process.returncode is not None


def test_a_worker_that_cannot_go_on_says_why(workers: Any, scripts: SimpleNamespace) -> None:
    unavailable = scripts.systems.Unavailable
    with pytest.raises(unavailable, match="ValueError: no such model"):
        workers("refuse")
    with pytest.raises(unavailable, match="as many tokens"):
        workers().generate([([13], 4)])
    with pytest.raises(unavailable, match="it ended: the last words"):
        workers().generate([([666], 4)])


def test_rounds_do_not_share_prompts(scripts: SimpleNamespace) -> None:
    """Prompts of a round start with a token of its own, the same one for requests that share a
    prefix; a stream's first token is asked for with a prompt that nothing has seen."""
    asked = []
    worker = SimpleNamespace(
        generate=lambda requests: (
            asked.append(requests)
            or {"seconds": float(len(asked)), "outputs": [[0]], "memory_bytes": 1}
        )
    )
    requests = [([1, 2, 3], 5), ([1, 2, 4], 5)]
    run = scripts.comparison.run_round
    assert run(worker, "prefix", requests, salt=0)["output_tokens"] == 10
    run(worker, "prefix", requests, salt=1)
    prompts = [[ids for ids, _ in one] for one in asked]
    assert prompts[0] == [[1000, 2, 3], [1000, 2, 4]]
    assert prompts[1] == [[1001, 2, 3], [1001, 2, 4]]
    asked.clear()
    figures = run(worker, "lat", requests, salt=2)
    assert [[count for _, count in one] for one in asked] == [[1], [1], [5], [5]]
    assert len({one[0][0][0] for one in asked}) == 2
    assert asked[0][0][0][1:] == [2, 3] and asked[2][0][0][1:] == [2, 3]
    # They took 1, 2, 3 and 4 seconds; eight tokens came after the two first ones.
    assert figures["first_token_s"] == 1.5
    assert figures["seconds_per_token"] == pytest.approx((3 + 4 - 1 - 2) / 8)


def test_ratios_are_those_of_each_round(scripts: SimpleNamespace) -> None:
    """A round in which everything is slow changes no ratio."""

    def system(seconds: list[float], equal: int | None) -> dict[str, Any]:
        more = {"output_tokens": 100, "requests": 4}
        rounds = [{"seconds": one, **more} for one in seconds]
        if equal is not None:
            rounds[0]["equal_outputs"] = equal
        return {"rounds": {"thr": rounds}}

    systems = {"quire-fp32": system([1.0, 9.0, 2.0], None), "peer": system([2.0, 18.0, 8.0], 3)}
    rows = scripts.report.workload_table("thr", systems, "peer").splitlines()[2:]
    assert rows[0] == "| quire-fp32 | 2.00 (1.00-9.00) | 50.0 (11.1-100.0) | 2.00 (2.00-4.00) |  |"
    assert rows[1] == "| peer | 8.00 (2.00-18.00) | 12.5 (5.6-50.0) | 1.00 (1.00-1.00) | 3 of 4 |"


def test_installed_size_follows_dependencies() -> None:
    """Sizes are those of the files; what is not needed is not counted."""
    command = [sys.executable, str(FOLDER / "cpu_peers" / "installed_size.py"), "pytest"]
    sizes = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["sizes"]
    assert {"pytest", "pluggy", "iniconfig", "packaging", "pygments"} <= sizes.keys()
    assert not {"torch", "numpy", "hypothesis"} & sizes.keys()
    distribution = importlib.metadata.distribution("pluggy")
    site = Path(str(distribution.locate_file("")))
    folders = [site / "pluggy", *site.glob("pluggy-*.dist-info")]
    files = [file for one in folders for file in one.rglob("*") if file.is_file()]
    compiled = sum(file.stat().st_size for file in files if file.suffix == ".pyc")
    everything = sum(file.stat().st_size for file in files)
    # Whether compiled files are listed depends on who installed the package.
    assert everything - compiled <= sizes["pluggy"] <= everything


def test_safetensors_copy_is_the_model(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """transformers reads the written folder and computes what the original does."""
    original = save_tiny(tmp_path / "original")
    config = load_model_config(str(tmp_path / "original"))
    folder = scripts.model.write_safetensors(tmp_path / "copy", config)
    copy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = random_tokens(40)
    assert torch.equal(reference_logits(copy, tokens), reference_logits(original, tokens))
    text = "The quick brown fox"
    assert (
        AutoTokenizer.from_pretrained(folder)(text).input_ids == ascii_tokenizer().encode(text).ids
    )


def test_q8_0_copy_of_a_gguf_file(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """Metadata stays, vectors too; matrices are as near as 8 bits allow."""
    source, copy = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    matrix = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    vector = np.arange(5, dtype=np.float32)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 3])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("matrix", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("vector", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scripts.model.write_q8_0(copy, source)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(copy)
    kept = [name for name in before.fields if name != "general.file_type"]
    assert kept == [name for name in after.fields if name != "general.file_type"]
    for name in kept:
        if not name.startswith("GGUF."):
            assert after.fields[name].contents() == before.fields[name].contents()
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    found = {tensor.name: tensor for tensor in after.tensors}
    assert found["matrix"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert np.array_equal(found["vector"].data, vector)
    wanted = gguf.quants.dequantize(before.tensors[0].data, kind)
    near = gguf.quants.dequantize(found["matrix"].data, found["matrix"].tensor_type)
    assert 0 < np.abs(near - wanted).max() <= np.abs(wanted).max() / 127


@pytest.mark.slow
def test_quire_and_transformers(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run with the real model: both give the same tokens; what is not there is named."""
    workload = {
        "thr": [{"ids": list(range(500 + i, 510 + 3 * i)), "out": 3 + i} for i in range(3)],
        "prefix": [{"ids": [*range(700, 740), 800 + i], "out": 4} for i in range(3)],
        "lat": [{"ids": list(range(900, 920)), "out": 6}] * 2,
    }
    (tmp_path / "workload.json").write_text(json.dumps(workload))
    words = ["--requests", str(tmp_path / "workload.json"), "--json", str(tmp_path / "out.json")]
    words += ["--systems", "quire-fp32", "openvino-fp32", "transformers-fp32"]
    words += ["--peer", f"openvino={tmp_path}/nothing", "--base", "vllm-fp32"]
    words += ["--rounds", "2", "--starts", "1", "--streams", "1"]
    scripts.main(words)
    shown = capsys.readouterr().out
    assert f"not available: openvino-fp32: {tmp_path}/nothing cannot be run" in shown
    assert "vllm-fp32 is not available: ratios are to transformers-fp32 instead." in shown
    assert shown.count("| transformers-fp32 |") == 4
    systems = json.loads((tmp_path / "out.json").read_text())["systems"]
    assert list(systems) == ["quire-fp32", "transformers-fp32"]
    for workload_name, requests in (("thr", 3), ("prefix", 3), ("lat", 1)):
        rounds = systems["transformers-fp32"]["rounds"][workload_name]
        assert [one["equal_outputs"] for one in rounds] == [requests] * 2
