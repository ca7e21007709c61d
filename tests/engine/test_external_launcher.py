"""Processes that torchrun has started, each with an engine: all plan and answer alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM
from quire.cli import main
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


PROGRAM = """
import atexit, json, os, sys
from pathlib import Path

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])

def note_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    (folder / f"threads{rank}").write_text("".join(names))

atexit.register(note_threads)  # runs last, being the first
import torch.distributed as dist
from quire import LLM, SamplingParams
dist.init_process_group("gloo")
options = json.loads(sys.argv[2])
errors = []
for name, changes in [
    ("b" if rank else "a", {}),
    ("a", {"max_num_seqs": 3 + 5 * rank}),
    ("a", {"seed": rank}),
]:
    try:
        LLM(model=str(folder / name), **{**options, **changes})
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
llm = LLM(model=str(folder / "a"), num_threads=1 + rank, **options)
clock = llm._core.clock
llm._core.clock = lambda: clock() * (1 + 9 * rank)
plans = []
llm._core.on_plan = lambda plan: plans.append([len(plan.rows), plan.num_tokens])
prompts = [dict(prompt_token_ids=[1, 2, 3 + i] * 12) for i in range(8)]
params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
llm.generate(prompts, params, use_tqdm=False)
import torch.distributed.nn.functional  # as torch's compiler and transformers do
(folder / f"found{rank}").write_text(json.dumps([errors, plans]))
"""


@pytest.mark.slow
def test_ranks_that_are_not_alike(tmp_path: Path) -> None:
    """Each says what differs, at once; those that are alike plan alike, whatever their clocks say.
    The program has made the process group, whose threads end before the interpreter does."""
    save_tiny(tmp_path / "a", "llama")
    save_tiny(tmp_path / "b", "llama", seed=1)
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    wanted = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    options = {name: value for name, value in OPTIONS.items() if name != "num_threads"} | wanted
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*torchrun, "--nproc-per-node", "2", str(script), str(tmp_path), json.dumps(options)]
    subprocess.run(words, check=True, timeout=120)
    found = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    for error, cause in zip(
        found[0][0],
        [
            rf"started with model='{tmp_path}/b', rank 0 on \S+ with model='{tmp_path}/a'",
            r"rank 1 on \S+ was started with max_num_seqs=8, rank 0 on \S+ with max_num_seqs=3",
            r"with seed=1, rank 0 on \S+ with seed=0; start all processes alike",
        ],
        strict=True,
    ):
        assert re.search(cause, error) and error.startswith("OptionError"), error
    assert "gloo" not in "".join((tmp_path / f"threads{rank}").read_text() for rank in (0, 1))


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


def test_requests_that_come_at_any_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines would plan them in different steps."""
    with pytest.raises(OptionError, match=r"external_launcher.* is for LLM alone: AsyncLLM"):
        AsyncLLM(distributed_executor_backend="external_launcher")
    words = ["serve", "--distributed-executor-backend", "external_launcher"]
    assert main(words) == 2
    assert "'external_launcher' is for LLM alone: a server" in capsys.readouterr().err
