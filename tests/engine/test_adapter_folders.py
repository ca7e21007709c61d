"""What folders of adapters hold, read on other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine import adapter_folders
from quire.engine.adapter_folders import NUM_THREADS, AdapterFolders
from quire.files.adapter import AdapterFile, read_adapter
from quire.protocol.adapter import LoRARequest
from quire.protocol.errors import AdapterError
from tests.files.test_hostile_adapters import PAIR, numbers, write


@pytest.fixture
def folders() -> Iterator[AdapterFolders]:
    made = AdapterFolders()
    yield made
    made.shutdown()


def request(folder: Path, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest(folder.name, 1, str(folder), load_inplace=load_inplace)


def test_what_is_known_does_not_wait_for_what_is_read(
    folders: AdapterFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = request(write(tmp_path / "hot", PAIR))
    digest = folders.read(hot).result(60).digest
    may_go_on = threading.Event()

    def slowly(folder: str, name: str) -> AdapterFile:
        may_go_on.wait(60)
        return read_adapter(folder, name)

    monkeypatch.setattr(adapter_folders, "read_adapter", slowly)
    cold = [
        folders.read(request(write(tmp_path / f"cold{i}", PAIR))) for i in range(NUM_THREADS + 1)
    ]
    assert folders.read(hot).result(60).digest == digest
    assert not any(one.done() for one in cold)
    may_go_on.set()
    assert {one.result(60).digest for one in cold} == {digest}


def test_new_files_are_read(folders: AdapterFolders, tmp_path: Path) -> None:
    one = request(write(tmp_path / "one", PAIR))
    first = folders.read(one).result(60)
    assert folders.read(one).result(60) is first
    again = folders.read(request(tmp_path / "one", load_inplace=True)).result(60)
    assert again is not first and again.digest == first.digest
    write(tmp_path / "one", {name: 2 * numbers(*tensor.shape) for name, tensor in PAIR.items()})
    assert folders.read(one).result(60).digest != first.digest


@pytest.mark.parametrize("path", ["none", "\0", "~none/x"])
def test_errors_are_passed_on(path: str, folders: AdapterFolders) -> None:
    with pytest.raises(AdapterError, match="is not a folder"):
        folders.read(LoRARequest("one", 1, path)).result(60)
