"""`AdapterFolders`: reads what adapters' folders hold, beside the step loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

from quire.files.adapter import AdapterFile, adapter_folder, read_adapter
from quire.protocol.adapter import LoRARequest

NUM_THREADS = 4
"""That read. A folder that hangs keeps one of them."""
NUM_LOOKS = 16
"""Folders that are looked at side by side, which takes no time unless one hangs."""
MAX_LOOK_S = 1.0
"""How long a look at a folder may take, if it is known what it held."""
MAX_KNOWN = 4096
"""Folders of which it is known what they hold."""

Signature = tuple[tuple[str, int, int, int, int], ...]


@dataclass(slots=True)
class _Look:
    reference: LoRARequest
    answer: Future[AdapterFile]
    since: float
    is_settled: bool = False


class AdapterFolders:
    """A folder whose files look as they did is not read again, unless that is asked for. What is
    known of one that has gone, or hangs, is what it held."""

    def __init__(self) -> None:
        self._looks = ThreadPoolExecutor(NUM_LOOKS, thread_name_prefix="quire-adapter-looks")
        """At what is known, which does not wait for what is read."""
        self._reads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-adapter-folders")
        self._lock = Lock()
        self._queued: dict[str, dict[bool, _Look]] = {}
        """Of each folder that a thread looks at, the looks that have not begun, by whether it is
        read anew: what asks for the same meanwhile joins in."""
        self._open: dict[Future[AdapterFile], _Look] = {}
        """What is known already and waits for a look."""
        self._reading: dict[str, tuple[Signature, Future[AdapterFile]]] = {}
        """Of each folder that is read, how it looked before."""
        self._known: OrderedDict[str, tuple[Signature, AdapterFile]] = OrderedDict()

    def read(self, reference: LoRARequest) -> Future[AdapterFile]:
        path, anew = reference.lora_path, reference.load_inplace
        with self._lock:
            is_busy = path in self._queued
            queued = self._queued.setdefault(path, {})
            if (found := queued.get(anew)) is not None:
                return found.answer
            queued[anew] = look = _Look(reference, Future(), time.monotonic())
            if not anew and path in self._known:
                self._open[look.answer] = look
            if not is_busy:
                self._looks.submit(self._look, path)
        return look.answer

    def poll(self) -> None:
        """Answer what waits for folders that hang by what is known of them."""
        before = time.monotonic() - MAX_LOOK_S
        with self._lock:
            late = [look for look in self._open.values() if look.since <= before]
            known = [self._known.get(look.reference.lora_path) for look in late]
        for look, one in zip(late, known, strict=True):
            if one is not None:
                self._settle(look, one[1])

    def _look(self, path: str) -> None:
        """At one folder, as often as that is asked for meanwhile."""
        while True:
            with self._lock:
                queued = self._queued[path]
                if not queued:
                    del self._queued[path]
                    return
                look = queued.pop(next(iter(queued)))
            try:
                signature, known = self._find(look.reference)
                if known is None:
                    reading = self._begin_reading(look.reference, signature)
                    reading.add_done_callback(partial(self._pass_on, look))
                else:
                    self._settle(look, known)
            except Exception as error:
                self._settle(look, error)

    def _begin_reading(self, reference: LoRARequest, signature: Signature) -> Future[AdapterFile]:
        """Or join in, where the folder is being read as it looks now."""
        path = reference.lora_path
        with self._lock:
            before = self._reading.get(path)
            if before is not None and before[0] == signature and not reference.load_inplace:
                return before[1]
            reading = self._reads.submit(self._read, reference)
            self._reading[path] = signature, reading
        reading.add_done_callback(partial(self._end_reading, path))
        return reading

    def _end_reading(self, path: str, done: Future[AdapterFile]) -> None:
        with self._lock:
            if path in self._reading and self._reading[path][1] is done:
                del self._reading[path]

    def _pass_on(self, look: _Look, done: Future[AdapterFile]) -> None:
        if done.cancelled():
            look.answer.cancel()
        else:
            self._settle(look, done.exception() or done.result())

    def _settle(self, look: _Look, found: AdapterFile | BaseException) -> None:
        with self._lock:
            self._open.pop(look.answer, None)
            if look.is_settled:
                return
            look.is_settled = True
        if isinstance(found, BaseException):
            look.answer.set_exception(found)
        else:
            look.answer.set_result(found)

    def _find(self, reference: LoRARequest) -> tuple[Signature, AdapterFile | None]:
        """How a folder looks now, and what it holds if that is known. One that has gone held what
        is known of it: the engine may have it yet."""
        signature = _signature(reference.lora_path)
        with self._lock:
            known = self._known.get(reference.lora_path)
        if known is None or reference.load_inplace or (signature and known[0] != signature):
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


def _signature(folder: str) -> Signature:
    """What changes when files are written."""
    try:
        files = sorted(adapter_folder(folder).glob("adapter_*"))
        stats = [(file.name, file.stat()) for file in files]
    except (OSError, ValueError):  # reading it says what is wrong
        return ()
    return tuple(
        (name, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for name, one in stats
    )
