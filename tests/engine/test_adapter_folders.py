"""What folders of adapters hold, read on other threads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine import adapter_folders
from quire.engine.adapter_folders import NUM_LOOKS, NUM_THREADS, AdapterFolders
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


def test_what_is_known_of_a_folder_outlives_it(folders: AdapterFolders, tmp_path: Path) -> None:
    """The engine may have the adapter in its memory, and goes on with it."""
    one = request(write(tmp_path / "one", PAIR))
    known = folders.read(one).result(60)
    shutil.rmtree(tmp_path / "one")
    assert folders.read(one).result(60) is known
    with pytest.raises(AdapterError, match="is not a folder"):
        folders.read(request(tmp_path / "one", load_inplace=True)).result(60)
    write(tmp_path / "one", {name: 2 * numbers(*tensor.shape) for name, tensor in PAIR.items()})
    assert folders.read(one).result(60).digest != known.digest


def test_a_folder_that_hangs_holds_no_other_up(
    folders: AdapterFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, away = (request(write(tmp_path / name, PAIR)) for name in ("here", "away"))
    new = request(tmp_path / "away-too")
    digest = folders.read(here).result(60).digest
    assert folders.read(away).result(60).digest == digest
    may_go_on = threading.Event()
    look = adapter_folders._signature

    def hang(folder: str) -> adapter_folders.Signature:
        if "away" in folder:
            may_go_on.wait(60)
        return look(folder)

    monkeypatch.setattr(adapter_folders, "_signature", hang)
    asked = [[folders.read(one) for one in (away, new)] for _ in range(NUM_LOOKS)]
    assert folders.read(here).result(60).digest == digest
    folders.poll()
    assert not any(one.done() for pair in asked for one in pair)
    monkeypatch.setattr(adapter_folders, "MAX_LOOK_S", 0.0)
    folders.poll()
    assert {known.result(0).digest for known, _ in asked} == {digest}, "as it was"
    assert not any(unknown.done() for _, unknown in asked)
    may_go_on.set()
    with pytest.raises(AdapterError, match="is not a folder"):
        asked[0][1].result(60)
    assert folders.read(away).result(60).digest == digest


def test_a_folder_is_read_once_for_all_who_ask(
    folders: AdapterFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request(write(tmp_path / "one", PAIR))
    other = request(write(tmp_path / "other", PAIR))
    may_go_on = threading.Event()
    num_reads = 0

    def slowly(folder: str, name: str) -> AdapterFile:
        nonlocal num_reads
        if name == "one":
            num_reads += 1
            may_go_on.wait(60)
        return read_adapter(folder, name)

    monkeypatch.setattr(adapter_folders, "read_adapter", slowly)
    asked = []
    for _ in range(2 * NUM_THREADS):
        asked.append(folders.read(one))
        folders.read(other).result(60)  # so that the look at `one` before has begun
    may_go_on.set()
    assert len({found.result(60).digest for found in asked}) == 1 and num_reads == 1
