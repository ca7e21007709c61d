"""Processes that torchrun has started, each with an engine: all plan and answer alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM
from quire.protocol.errors import OptionError
from tests.tiny import save_tiny

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 128,
    "num_gpu_blocks_override": 60,
    "skip_tokenizer_init": True,
}
SCRIPT = """
import atexit, json, os, sys
from pathlib import Path

def note_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    Path(f"{sys.argv[2]}-threads{os.environ['RANK']}").write_text("".join(names))

if len(sys.argv) > 2:
    atexit.register(note_threads)  # runs last, being the first
from quire import LLM, SamplingParams
options = json.loads(sys.argv[1])
llm = LLM(**options)
prompts = [dict(prompt_token_ids=[1, 2, 3 + i]) for i in range(8)]
params = [SamplingParams(max_tokens=12, temperature=i % 2, seed=i, logprobs=2) for i in range(8)]
found = [
    [list(one.token_ids), [sorted(step) for step in one.logprobs]]
    for output in llm.generate(prompts, params, use_tqdm=False)
    for one in output.outputs
]
import torch.distributed.nn.functional  # as torch's compiler and transformers do
if len(sys.argv) > 2:
    with open(sys.argv[2] + os.environ["RANK"], "w") as file:
        json.dump(found, file)
else:
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_all_ranks_answer(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = {"model": str(tmp_path), **OPTIONS}
    alone = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
    )
    options |= {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    out = str(tmp_path / "found")
    subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script), json.dumps(options), out], check=True
    )
    expected = json.loads(alone.stdout)
    assert [json.loads(Path(f"{out}{rank}").read_text()) for rank in (0, 1)] == [expected] * 2
    # One that runs on while the interpreter ends may abort the process.
    assert "gloo" not in "".join(Path(f"{out}-threads{rank}").read_text() for rank in (0, 1))


def test_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "llama")
    wanted = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(OptionError, match=r"external_launcher.*RANK.*torchrun"):
        LLM(model=str(tmp_path), **OPTIONS, **wanted)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(OptionError, match=r"tensor_parallel_size=2.*WORLD_SIZE=3"):
        LLM(model=str(tmp_path), **OPTIONS, **wanted)
