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

from quire.config.device import cpu_device
from quire.config.options import HOST_OPTIONS, EngineOptions
from quire.engine.executors.channel import CUT_S, MAX_MESSAGE_BYTES, Channel, notice_cut
from quire.engine.executors.launch import END_S, RankProcesses, fit_to_host, rank_starts
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
from quire.worker.groups import listen, new_store, shown_address
from quire.worker.ring import ReadersLate

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_HANDSHAKE_BYTES = 1 << 20
RETRY_S = 0.5
POLL_S = 0.02
REPORT_S = 0.1
"""The engine waits for longer than that before it looks for the cause of a failure."""


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
                line, peer = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._handshake, args=(line, peer), daemon=True).start()

    def _handshake(self, line: socket.socket, peer: tuple[Any, ...]) -> None:
        line.settimeout(HANDSHAKE_S)
        notice_cut(line, CUT_S)
        channel = Channel(line, MAX_HANDSHAKE_BYTES)
        decoder: Decoder[Hello | JoinNode] = Decoder(Hello | JoinNode)
        try:
            data = channel.peek()
            if data is None:
                channel.close()  # a port scan, say
                return
            message = decoder.decode(data)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning(
                "a connection from %s is closed: it does not greet as a host with this version "
                "of Quire does (%s)",
                shown_address(*peer[:2]),
                error,
            )
            channel.close()
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
        self._joining = threading.Lock()
        self._names = {0: socket.gethostname()}
        self._ended: dict[int, str] = {}
        super().__init__(options, parallel.master_addr, parallel.master_port)
        try:
            self._processes.start_all(self._starts(0), parallel.tensor_parallel_size)
        except BaseException:
            self.stop()
            raise

    def _starts(self, node: int) -> list[StartRank]:
        count = self._ranks_per_node
        ranks = range(node * count, (node + 1) * count)
        # A token stays on its host: connections are not encrypted.
        options = self._options.replace(hf_token=None) if node else self._options
        return [self.connect(one) for one in rank_starts(options, ranks)]

    def connected(self, channel: Channel, message: Hello | JoinNode) -> None:
        if isinstance(message, Hello):
            super().connected(channel, message)
            return
        channel.read()
        node = message.node_rank
        with self._joining:
            is_taken = not 0 < node < self._num_nodes or node in self._nodes
            if not is_taken:
                self._nodes[node], self._names[node] = channel, message.host
        if is_taken:
            reason = f"node_rank={node} is taken, or not below nnodes={self._num_nodes}"
            with contextlib.suppress(OSError):  # it is gone already
                channel.send(encode(Refused(f"{reason}; give each host a number of its own.")))
            channel.close()
            return
        try:
            self._admit(node, channel, difference(message, self._given))
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("host %s (node_rank=%d) is lost: %s", message.host, node, error)
        finally:
            channel.close()
            del self._nodes[node]  # another one may come

    def _admit(self, node: int, channel: Channel, differs: str | None) -> None:
        """Until the host is gone. Its ranks are lost with it, if they were started."""
        if differs:
            self._lose(node, differs)
            channel.send(encode(Refused(differs)))
            return
        channel.send(encode(StartRanks(self._starts(node))))
        try:
            self._follow(node, channel)
        finally:
            name = self._names[node]
            self._lose(node, f"host {name} (node_rank={node}) cannot be reached any more")

    def _follow(self, node: int, channel: Channel) -> None:
        """Listen to a host until it is gone."""
        channel.line.settimeout(None)
        decoder: Decoder[FromNode] = Decoder(FromNode)
        while (data := channel.read()) is not None:
            message = decoder.decode(data)
            if isinstance(message, RankEnded):
                self._ended[message.rank] = f"{message.cause} (host {self._names[node]})"

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

    def stop(self, failure: str = "", was_in_service: bool = False) -> None:
        self.listener.close()  # before hosts that lose their connection try again
        for channel in list(self._nodes.values()):
            with contextlib.suppress(OSError):  # it is gone already
                channel.send(encode(EngineEnded(failure, was_in_service)))
                # A close with something left to read might take the message back.
                channel.line.shutdown(socket.SHUT_WR)
        self.close()
        self._processes.stop()
        deadline = time.monotonic() + END_S
        while self._nodes and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for channel in list(self._nodes.values()):
            channel.close()


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


def fit_to_node(start: StartRank, options: EngineOptions) -> None:
    """Replace what a rank of a host does not take from host 0."""
    host = options.parallel.master_addr  # by which this host reaches it
    assert isinstance(start.channel, Connected) and start.store is not None
    start.channel.host, start.store = host, (host, start.store[1])
    start.options["hf_token"] = options.model.hf_token
    if options.model.download_dir is not None:
        start.options["download_dir"] = options.model.download_dir
    if options.device.num_threads is not None:
        start.options["num_threads"] = options.device.num_threads
    fit_to_host(start, options.device.num_threads or cpu_device().num_threads)


# --- the other hosts ----------------------------------------------------------------------------


def run_node(options: EngineOptions) -> int:
    """Run the ranks of this host for the engine of host 0, until that ends. One that was lost, or
    has failed after it was in service, may come back: then its ranks are started again. A failure
    of the first start is told, and ends this host, too."""
    lost_at: float | None = None
    while True:
        channel = _connect(options)
        try:
            node = _Node(options, channel)
        except _NoAnswer:
            # An engine that ends may take a connection and not answer it.
            if lost_at is None or time.monotonic() - lost_at > options.parallel.timeout_s:
                raise
        else:
            ended = node.follow()
            is_final = ended is not None and not (ended.was_in_service or lost_at)
            reason = "its connection was lost" if ended is None else ended.reason
            if reason and not is_final:
                logger.error("%s is lost; waiting for it: %s", _address(options), reason)
            node.stop()
            if not reason:
                return 0
            if is_final:
                raise QuireError(f"{_address(options)} did not start: {reason}")
            lost_at = time.monotonic()
        time.sleep(RETRY_S)


class _NoAnswer(QuireError):
    """Of host 0."""


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
            channel.close()
            raise _NoAnswer(
                f"{self._address} has closed the connection, or not answered for "
                f"{HANDSHAKE_S:g} s; its log may say why. Check that master_port is that of host 0."
            )
        channel.line.settimeout(None)
        logger.info("ranks %s run here for %s", _listed(reply.ranks), self._address)
        for start in reply.ranks:
            fit_to_node(start, options)
        self._processes.start_all(reply.ranks, parallel.tensor_parallel_size)

    def _read(self) -> ToNode | None:
        decoder: Decoder[ToNode] = Decoder(ToNode)
        data = self._channel.read()
        return None if data is None else decoder.decode(data)

    def follow(self) -> EngineEnded | None:
        """Until the engine is gone; what it says of its end."""
        threading.Thread(target=self._report, name="quire-node", daemon=True).start()
        message = self._read()
        self._channel.close()
        return message if isinstance(message, EngineEnded) else None

    def stop(self) -> None:
        self._processes.stop()

    def _report(self) -> None:
        told: set[int] = set()
        try:
            while True:
                for rank, cause in self._processes.ended().items():
                    if rank not in told:
                        self._channel.send(encode(RankEnded(rank, cause)))
                        told.add(rank)
                self._channel.send(encode(Alive()))
                time.sleep(REPORT_S)
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
    return f"host 0 ({shown_address(parallel.master_addr, parallel.master_port)})"


def _listed(starts: list[StartRank]) -> str:
    return ", ".join(str(start.rank) for start in starts)
