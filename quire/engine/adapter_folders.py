"""`AdapterFolders`: reads what adapters' folders hold, beside the step loop."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Lock

from quire.files.adapter import AdapterFile, adapter_folder, read_adapter
from quire.protocol.adapter import LoRARequest

NUM_THREADS = 2
MAX_KNOWN = 4096
"""Folders of which it is known what they hold."""

Signature = tuple[tuple[str, int, int, int, int], ...]


class AdapterFolders:
    """A folder whose files look as they did is not read again, unless that is asked for."""

    def __init__(self) -> None:
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="quire-adapter-looks")
        """At what is known, which does not wait for what is read."""
        self._reads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-adapter-folders")
        self._lock = Lock()
        self._queued: dict[tuple[str, bool], Future[AdapterFile]] = {}
        """Those that no thread has begun with: what asks for them meanwhile joins in."""
        self._known: OrderedDict[str, tuple[Signature, AdapterFile]] = OrderedDict()

    def read(self, reference: LoRARequest) -> Future[AdapterFile]:
        key = reference.lora_path, reference.load_inplace
        with self._lock:
            if (found := self._queued.get(key)) is not None:
                return found
            self._queued[key] = answer = Future[AdapterFile]()
            self._looks.submit(self._look, reference, key, answer)
            return answer

    def _look(
        self, reference: LoRARequest, key: tuple[str, bool], answer: Future[AdapterFile]
    ) -> None:
        with self._lock:
            del self._queued[key]
        try:
            _, known = self._find(reference)
            if known is None:
                reading = self._reads.submit(self._read, reference)
                reading.add_done_callback(lambda done: _pass_on(done, answer))
            else:
                answer.set_result(known)
        except Exception as error:
            answer.set_exception(error)

    def _find(self, reference: LoRARequest) -> tuple[Signature, AdapterFile | None]:
        """How a folder looks now, and what it holds if that is known."""
        signature = _signature(reference.lora_path)
        with self._lock:
            known = self._known.get(reference.lora_path)
        if known is None or known[0] != signature or reference.load_inplace:
            return signature, None
        return known

    def _read(self, reference: LoRARequest) -> AdapterFile:
        signature, known = self._find(reference)
        if known is not None:  # others have asked for it, too
            return known
        file = read_adapter(reference.lora_path, reference.lora_name)
        file = replace(file, modules={}, places={})  # ranks read these for themselves
        with self._lock:
            self._known[reference.lora_path] = signature, file
            self._known.move_to_end(reference.lora_path)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return file

    def shutdown(self) -> None:
        self._looks.shutdown(wait=False, cancel_futures=True)
        self._reads.shutdown(wait=False, cancel_futures=True)


def _pass_on(done: Future[AdapterFile], answer: Future[AdapterFile]) -> None:
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


def _signature(folder: str) -> Signature:
    """What changes when files are written."""
    try:
        files = sorted(adapter_folder(folder).glob("adapter_*"))
        stats = [(file.name, file.stat()) for file in files]
    except OSError:  # reading it says what is wrong
        return ()
    return tuple(
        (name, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for name, one in stats
    )
