"""Ranks on several hosts, each of which was started by hand with its `node_rank`.

Host 0 has the engine and listens at `master_addr`:`master_port`. The others join there, are told
which ranks to start, and report when one ends. Each rank has a connection to host 0 of its own.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire.config.device import core_shares
from quire.config.options import HOST_OPTIONS, EngineOptions
from quire.engine.executors.channel import CUT_S, MAX_MESSAGE_BYTES, Channel, notice_cut
from quire.engine.executors.launch import RankProcesses, rank_starts
from quire.protocol import __version__
from quire.protocol.codec import Decoder, encode
from quire.protocol.errors import OptionError, QuireError
from quire.protocol.ranks import (
    Alive,
    Connected,
    EngineEnded,
    FromNode,
    Hello,
    JoinNode,
    RankEnded,
    Refused,
    StartRank,
    StartRanks,
    ToNode,
)
from quire.worker.groups import listen, new_store
from quire.worker.ring import ReadersLate

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_HANDSHAKE_BYTES = 1 << 20
RETRY_S = 0.5


class Listener:
    """Accepts connections and hands them over by their first message, which stays unread."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        connected: Callable[[Channel, Hello | JoinNode], None],
    ) -> None:
        self._secret, self._connected = secret, connected
        self._socket = listen(*address)
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self._accept, name="quire-listener", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            # `accept` of another thread goes on after a close alone.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._handshake, args=(line,), daemon=True).start()

    def _handshake(self, line: socket.socket) -> None:
        line.settimeout(HANDSHAKE_S)
        notice_cut(line, CUT_S)
        channel = Channel(line, MAX_HANDSHAKE_BYTES)
        decoder: Decoder[Hello | JoinNode] = Decoder(Hello | JoinNode)
        try:
            data = channel.peek()
            message = decoder.decode(data or b"")
        except (OSError, msgspec.MsgspecError):
            channel.close()  # a port scan, say
            return
        if isinstance(message, Hello) and message.secret != self._secret:
            channel.close()
            return
        channel.max_bytes = MAX_MESSAGE_BYTES
        self._connected(channel, message)


class ConnectedRanks:
    """Ranks with a TCP connection each."""

    def __init__(self, options: EngineOptions, host: str, port: int) -> None:
        self.channels: dict[int, Channel] = {}
        self._timeout_s, self._host = options.parallel.timeout_s, host
        self._secret = secrets.token_hex(16)
        try:
            self.listener = Listener((host, port), self._secret, self.connected)
        except OSError as error:
            raise OptionError(
                f"cannot listen at master_addr={host!r}, master_port={port}: {error}. Set "
                "master_addr to an address of this host that the others reach, and master_port to "
                "a free port."
            ) from None
        self._store = new_store(host, options.parallel.timeout_s)
        self.listener.start()

    def connected(self, channel: Channel, message: Hello | JoinNode) -> None:
        if isinstance(message, Hello):
            channel.line.settimeout(self._timeout_s)
            self.channels[message.rank] = channel
        else:
            channel.close()

    def connect(self, start: StartRank) -> StartRank:
        """Tell a rank where to find this process, and the other ranks."""
        start.channel = Connected(self._host, self.listener.port, self._secret)
        start.store = (self._host, self._store.port)
        return start

    def send(self, order: bytes, deadline: float) -> None:
        for rank, channel in sorted(self.channels.items()):
            try:
                channel.send(order)
            except TimeoutError:
                raise ReadersLate([rank]) from None

    def close(self) -> None:
        self.listener.close()
        for channel in list(self.channels.values()):
            channel.close()


class NodeProcesses(ConnectedRanks):
    """Processes on `nnodes` hosts, this one included: an equal number on each."""

    def __init__(self, options: EngineOptions, given: EngineOptions) -> None:
        """`given` are the options before they were resolved, to compare with those of others."""
        parallel = options.parallel
        self._options, self._given, self._num_nodes = options, given, parallel.nnodes
        self._ranks_per_node = parallel.num_ranks // parallel.nnodes
        self._processes = RankProcesses()
        self._nodes: dict[int, Channel] = {}
        self._names = {0: socket.gethostname()}
        self._ended: dict[int, str] = {}
        super().__init__(options, parallel.master_addr, parallel.master_port)
        try:
            for start in self._starts(0):
                self._processes.start(start)
        except BaseException:
            self.stop()
            raise

    def _starts(self, node: int) -> list[StartRank]:
        count = self._ranks_per_node
        ranks = range(node * count, (node + 1) * count)
        # A token stays on its host: connections are not encrypted.
        options = self._options.replace(hf_token=None) if node else self._options
        return [self.connect(one) for one in rank_starts(options, ranks, count)]

    def connected(self, channel: Channel, message: Hello | JoinNode) -> None:
        if isinstance(message, Hello):
            super().connected(channel, message)
            return
        channel.read()
        node = message.node_rank
        if not 0 < node < self._num_nodes or node in self._nodes:
            reason = f"node_rank={node} is taken, or not below nnodes={self._num_nodes}"
            channel.send(encode(Refused(f"{reason}; give each host a number of its own.")))
            channel.close()
            return
        self._nodes[node], self._names[node] = channel, message.host
        differs = difference(message, self._given)
        if differs:
            channel.send(encode(Refused(differs)))
            self._lose(node, differs)
            return
        channel.send(encode(StartRanks(self._starts(node))))
        self._follow(node, channel)

    def _follow(self, node: int, channel: Channel) -> None:
        """Listen to a host until it is gone."""
        channel.line.settimeout(None)
        decoder: Decoder[FromNode] = Decoder(FromNode)
        while (data := channel.read()) is not None:
            message = decoder.decode(data)
            if isinstance(message, RankEnded):
                self._ended[message.rank] = f"{message.cause} (host {self._names[node]})"
        self._lose(node, f"host {self._names[node]} (node_rank={node}) cannot be reached any more")

    def _lose(self, node: int, cause: str) -> None:
        for rank in range(node * self._ranks_per_node, (node + 1) * self._ranks_per_node):
            self._ended.setdefault(rank, cause)

    def ended(self) -> dict[int, str]:
        return {**self._processes.ended(), **self._ended}

    def missing(self) -> str:
        absent = [str(node) for node in range(1, self._num_nodes) if node not in self._nodes]
        if not absent:
            return "What their processes wrote may say more."
        parallel = self._options.parallel
        return (
            f"No host has joined as node_rank {', '.join(absent)} of nnodes={self._num_nodes}. "
            f"Start `quire serve` there with the same options, its --node-rank and --master-addr "
            f"{parallel.master_addr} --master-port {parallel.master_port}, which must be reachable "
            "(firewall, interface)."
        )

    def stop(self, comes_back: bool = False) -> None:
        self.listener.close()  # before hosts that lose their connection try again
        for channel in list(self._nodes.values()):
            if not comes_back:
                with contextlib.suppress(OSError):  # it is gone already
                    channel.send(encode(EngineEnded()))
            channel.close()
        self.close()
        self._processes.stop()


def difference(node: JoinNode, options: EngineOptions) -> str | None:
    """What keeps a host from joining: another version, or an option with another value. Both sides
    have the options that they were given: resolved ones may differ between the same commands."""
    if node.version != __version__:
        return (
            f"host {node.host} runs Quire {node.version}, host 0 runs {__version__}; install the "
            "same version on all hosts."
        )
    # As they look after a way through a socket.
    ours, defaults = (msgspec.to_builtins(one.flat()) for one in (options, EngineOptions()))
    for name, value in node.options.items():
        given = name not in HOST_OPTIONS and value != defaults.get(name)
        if given and value != ours.get(name):
            return (
                f"host {node.host} (node_rank={node.node_rank}) was started with {name}={value!r}, "
                f"host 0 with {name}={ours.get(name)!r}; give all hosts the same options."
            )
    return None


def own_options(options: EngineOptions, num_local: int) -> dict[str, Any]:
    """What the ranks of a host do not take from host 0."""
    own: dict[str, Any] = {"hf_token": options.model.hf_token}
    if options.model.download_dir is not None:
        own["download_dir"] = options.model.download_dir
    if options.device.num_threads is not None:
        own["num_threads"] = max(options.device.num_threads // num_local, 1)
    return own


# --- the other hosts ----------------------------------------------------------------------------


def run_node(options: EngineOptions) -> int:
    """Run the ranks of this host for the engine of host 0, until that ends. An engine that was
    lost may come back: then its ranks are started again."""
    while True:
        node = _Node(options, _connect(options))
        if node.run():
            return 0
        time.sleep(RETRY_S)


class _Node:
    """One engine's ranks on this host."""

    def __init__(self, options: EngineOptions, channel: Channel) -> None:
        self._channel, self._processes = channel, RankProcesses()
        self._address, parallel = _address(options), options.parallel
        said = options.replace(hf_token=None).flat()
        hello = JoinNode(parallel.node_rank, socket.gethostname(), __version__, said)
        channel.line.settimeout(HANDSHAKE_S)
        channel.send(encode(hello))
        reply = self._read()
        if isinstance(reply, Refused):
            raise QuireError(reply.reason)
        if not isinstance(reply, StartRanks):
            raise QuireError(
                f"{self._address} has closed the connection, or not answered for "
                f"{HANDSHAKE_S:g} s; its log may say why. Check that master_port is that of host 0."
            )
        channel.line.settimeout(None)
        logger.info("ranks %s run here for %s", _listed(reply.ranks), self._address)
        shares = core_shares(len(reply.ranks))
        for start, share in zip(reply.ranks, shares, strict=True):
            start.processors = share if start.processors else []  # those here, not of host 0
            start.options |= own_options(options, len(reply.ranks))
            self._processes.start(start)

    def _read(self) -> ToNode | None:
        decoder: Decoder[ToNode] = Decoder(ToNode)
        data = self._channel.read()
        return None if data is None else decoder.decode(data)

    def run(self) -> bool:
        """Until the engine is gone; says whether it ended as it should."""
        threading.Thread(target=self._report, name="quire-node", daemon=True).start()
        has_ended = isinstance(self._read(), EngineEnded)
        if not has_ended:
            logger.error("%s is lost; waiting for it", self._address)
        self._channel.close()
        self._processes.stop()
        return has_ended

    def _report(self) -> None:
        told: set[int] = set()
        try:
            while True:
                for rank, cause in self._processes.ended().items():
                    if rank not in told:
                        self._channel.send(encode(RankEnded(rank, cause)))
                        told.add(rank)
                self._channel.send(encode(Alive()))
                time.sleep(RETRY_S)
        except OSError:
            return  # the other thread notices it too


def _connect(options: EngineOptions) -> Channel:
    parallel = options.parallel
    deadline = time.monotonic() + parallel.timeout_s
    while True:
        try:
            line = socket.create_connection((parallel.master_addr, parallel.master_port), CUT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise QuireError(
                    f"{_address(options)} does not answer for {parallel.timeout_s:g} s "
                    f"(distributed_timeout_seconds): {error}. Start the engine there with "
                    f"--nnodes {parallel.nnodes} --node-rank 0; check master_addr, master_port and "
                    "the firewall."
                ) from None
            time.sleep(RETRY_S)
    notice_cut(line, CUT_S, is_read=True)
    return Channel(line)


def _address(options: EngineOptions) -> str:
    parallel = options.parallel
    return f"host 0 ({parallel.master_addr}:{parallel.master_port})"


def _listed(starts: list[StartRank]) -> str:
    return ", ".join(str(start.rank) for start in starts)
