"""Threads belong to an engine while it computes, and to the program before and after."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels import cpu
from quire.protocol.errors import AdapterError
from tests.tiny import save_tiny, tiny_llm

OF_THE_PROGRAM = 3
WANTED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path)
    return path


@pytest.fixture(autouse=True)
def threads_of_the_program() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(OF_THE_PROGRAM)
    yield
    torch.set_num_threads(before)
    cpu.set_num_threads(None)


class Watched:
    """An engine of `count` threads, and how many of torch and of the library its steps had."""

    def __init__(self, folder: Path, count: int, **options: Any) -> None:
        self.llm: LLM = tiny_llm(folder, num_threads=count, **options)
        self.seen: set[tuple[int, int]] = set()
        self.llm._core.executor.runner.model.register_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.seen.add((torch.get_num_threads(), cpu.library.num_threads()))

    def generate(self) -> set[tuple[int, int]]:
        self.seen.clear()
        self.llm.generate("the quick", WANTED, use_tqdm=False)
        return set(self.seen)


def test_torch_gets_its_threads_back(folder: Path, native: None) -> None:
    engine = Watched(folder, 2)
    assert torch.get_num_threads() == OF_THE_PROGRAM
    assert engine.generate() == {(1, 2)}
    assert torch.get_num_threads() == OF_THE_PROGRAM
    engine.llm.shutdown()
    assert torch.get_num_threads() == OF_THE_PROGRAM


def test_engines_of_one_process_each_have_theirs(folder: Path, native: None) -> None:
    """Whichever was made last, and whether the library computes or torch."""
    engines = {
        (2, 2): Watched(folder, 2, dtype="bfloat16"),
        (1, 4): Watched(folder, 4),
        (1, 2): Watched(folder, 2, quantization="int8"),
    }
    for _ in range(2):
        for threads, engine in engines.items():
            assert engine.generate() == {threads}
    assert torch.get_num_threads() == OF_THE_PROGRAM
    for engine in engines.values():
        engine.llm.shutdown()


def test_loading_an_adapter_changes_no_threads(folder: Path, tmp_path: Path) -> None:
    with tiny_llm(folder, enable_lora=True) as llm:
        adapters = llm._core.executor.runner.adapters
        assert adapters is not None
        with pytest.raises(AdapterError, match="is not a folder"):
            adapters.load("none", str(tmp_path / "none"), "").result(60)
    with ThreadPoolExecutor(1) as new:  # which begins with what was set last
        assert new.submit(torch.get_num_threads).result(60) == OF_THE_PROGRAM
