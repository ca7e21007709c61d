"""Ranks as actors of a Ray cluster. Ray places and starts them; orders, answers and tensors do not
pass through it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.config.options import EngineOptions
from quire.engine.executors.launch import END_S, LOOPBACK, fit_to_host, rank_starts
from quire.engine.executors.nodes import ConnectedRanks
from quire.protocol.codec import line, read_line
from quire.protocol.errors import EngineDeadError, OptionError
from quire.protocol.ranks import StartRank

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""Of a Ray that is started here: nothing goes through its object store."""
PROBE_S = 5.0
POLL_S = 0.5
PATIENCE_S = 3.0
"""A placement group that takes longer is worth a line."""


class RayActors(ConnectedRanks):
    """One actor per rank, in a placement group."""

    def __init__(self, options: EngineOptions) -> None:
        self._cluster = _Cluster()
        self._stopping, self._has_stopped = threading.Lock(), False
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}
        self._causes: dict[int, str] = {}
        self._nodes: list[str] = []
        try:
            self._group, nodes = _place(options)
            self._start(options, nodes)
        except BaseException:
            self._release()
            if hasattr(self, "listener"):
                self.close()
            raise

    def _start(self, options: EngineOptions, nodes: list[tuple[int, str]]) -> None:
        """An actor for each rank, in the bundle and on the node that are given for it."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        own = ray.util.get_node_ip_address()
        self._nodes = [addresses[node] for _, node in nodes]
        super().__init__(options, LOOPBACK if set(self._nodes) == {own} else own, 0)
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, node) in enumerate(nodes):
            ranks_of.setdefault(node, []).append(rank)
        root = str(Path(__file__).parents[3])
        actor_class = ray.remote(_actor_class())
        for ranks in ranks_of.values():
            for start in rank_starts(options, ranks):
                strategy = PlacementGroupSchedulingStrategy(self._group, nodes[start.rank][0])
                needed = _needed(options)
                actor = actor_class.options(
                    num_cpus=needed.get("CPU", 0),
                    num_gpus=needed.get("GPU", 0),
                    max_restarts=0,  # the others could not go on with a new one
                    scheduling_strategy=strategy,
                ).remote()
                self._actors.append(actor)
                self._runs[actor.run.remote(root, line(self.connect(start)))] = start.rank

    def ended(self) -> dict[int, str]:
        if self._has_stopped:
            return {}
        for run in _done(list(self._runs), 0.0):
            rank = self._runs.pop(run, None)  # another thread may have seen it, too
            if rank is not None and (cause := _cause(run)) is not None:
                self._causes[rank] = f"its actor on node {self._nodes[rank]} {cause}"
        # Before Ray knows more: ranks that miss this one must not be taken for the cause.
        cut = {
            rank: f"its actor on node {self._nodes[rank]} has closed its connection"
            for rank, channel in list(self.channels.items())
            if channel.is_closed() and rank in self._runs.values()
        }
        return {**cut, **self._causes}

    def missing(self) -> str:
        absent = [
            f"rank {rank} (node {node})"
            for rank, node in enumerate(self._nodes)
            if rank not in self.channels
        ]
        if not absent:
            return "What their actors wrote may say more (`ray logs`)."
        return (
            f"{', '.join(absent)}: no actor was started, or it has not reached "
            f"{self._host}:{self.listener.port}. Look at `ray list actors`, `ray logs` and the "
            "firewall between the nodes."
        )

    def stop(self, failure: str = "", was_in_service: bool = False) -> None:
        with self._stopping:
            if not self._has_stopped:
                self._has_stopped = True
                self.close()
                self._release()

    def _release(self) -> None:
        """Give back what Ray has given. A cluster that is gone may never answer."""
        ending = threading.Thread(target=self._end_actors, name="quire-ray-end", daemon=True)
        ending.start()
        ending.join(2 * END_S)
        self._cluster.leave()

    def _end_actors(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # the cluster ends them if this process cannot
            for actor in self._actors:
                ray.kill(actor)
            _done(list(self._runs), END_S)  # before that, the device's memory is not free
            if self._group is not None:
                remove_placement_group(self._group)


# --- the cluster --------------------------------------------------------------------------------


class _Cluster:
    """A connection to the cluster, shared by the engines of this process."""

    _lock = threading.Lock()
    _num_engines = 0
    """That use a connection which was made here; one of the user's own stays."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise OptionError(
                f"distributed_executor_backend='ray' needs the package ray ({error}): run "
                "`pip install '.[ray]'` in a clone of Quire, or `pip install ray`."
            ) from None
        with _Cluster._lock:
            self._is_counted = not ray.is_initialized() or _Cluster._num_engines > 0
            if not ray.is_initialized():
                with _sigterm_kept():
                    _connect()
            _Cluster._num_engines += self._is_counted

    def leave(self) -> None:
        import ray

        with _Cluster._lock:
            _Cluster._num_engines -= self._is_counted
            if self._is_counted and not _Cluster._num_engines:
                ray.shutdown()
            self._is_counted = False


def _connect() -> None:
    """To the cluster of RAY_ADDRESS, or that of this host; without one, Ray is started here."""
    import ray
    from ray._private import services

    address = services.get_ray_address_from_environment(None, None)
    if address is not None and "://" in address:
        raise OptionError(
            f"RAY_ADDRESS={address!r} is for Ray Client, which does not reach the ranks; run Quire "
            "on a node of the cluster, and leave RAY_ADDRESS unset there."
        )
    address = services.canonicalize_bootstrap_address(address)
    if address is None:
        logger.info("no Ray cluster is found; starting Ray on this host alone")
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            configure_logging=False,
        )
        return
    host, _, port = address.rpartition(":")
    try:
        # Ray itself would try for minutes.
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        ray.init(address=address, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"cannot join the Ray cluster at {address}: {error}. Run `ray start` on this host too "
            f"(--head, or --address {address}); if that cluster is gone, run `ray stop` and unset "
            "RAY_ADDRESS."
        ) from None


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray puts a handler of its own in the place of the application's."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


# --- placement ----------------------------------------------------------------------------------


def _needed(options: EngineOptions) -> dict[str, float]:
    """What one rank takes of a node."""
    return {"CPU": 1.0} if options.device.device == "cpu" else {"GPU": 1.0}


def _place(options: EngineOptions) -> tuple[Any, list[tuple[int, str]]]:
    """A placement group, and for each rank its bundle and its node. The tensor-parallel ranks of a
    stage are on one node if there is a node for each stage that can have them all."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    parallel = options.parallel
    ((kind, amount),) = _needed(options).items()
    per_node = [node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]]
    size = parallel.tensor_parallel_size
    if sum(has // (size * amount) for has in per_node) < parallel.pipeline_parallel_size:
        size = 1
    bundles = [{kind: size * amount}] * (parallel.num_ranks // size)
    asked = f"{len(bundles)} x {_listed(bundles[0])}"
    if sum(has // (size * amount) for has in per_node) < len(bundles):
        raise OptionError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} and pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size} need {asked} of the Ray cluster, which has "
            f"{_nodes_listed(kind)}. Add nodes (`ray start`), or choose smaller sizes."
        )
    group = placement_group(bundles, strategy="PACK")
    try:
        _await(group, asked, kind, parallel.timeout_s)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    own = ray.get_runtime_context().get_node_id()
    # Ranks that follow each other share a node, and the first ones this process's.
    order = sorted(node_of, key=lambda bundle: (node_of[bundle] != own, node_of[bundle]))
    return group, [(bundle, node_of[bundle]) for bundle in order for _ in range(size)]


def _await(group: Any, asked: str, kind: str, timeout_s: float) -> None:
    started, has_said = time.monotonic(), False
    while not group.wait(POLL_S):
        waited = time.monotonic() - started
        if waited > PATIENCE_S and not has_said:
            logger.info(
                "waiting for Ray to place %s; the cluster has %s", asked, _nodes_listed(kind)
            )
            has_said = True
        if waited > timeout_s:
            raise EngineDeadError(
                f"Ray has not placed {asked} within {timeout_s:g} s "
                f"(distributed_timeout_seconds). The cluster has {_nodes_listed(kind)}: others "
                "may use it (`ray status`). End them, add nodes, or choose smaller sizes."
            )


def _listed(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def _nodes_listed(kind: str) -> str:
    import ray

    nodes = [
        f"{node['Resources'].get(kind, 0.0):g} {kind} on node {node['NodeManagerAddress']}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    free = ray.available_resources().get(kind, 0.0)
    return f"{', '.join(nodes)} ({free:g} free in all)"


# --- actors -------------------------------------------------------------------------------------


def _actor_class() -> type:
    # A class of a function: Ray sends it as it is, to processes that may not find Quire yet.
    class QuireRank:
        def run(self, root: str, start: bytes) -> int:
            import sys

            if root not in sys.path:
                sys.path.insert(0, root)  # a checkout, where the engine runs from one
            from quire.engine.executors.ray import run_rank

            return run_rank(start)

    return QuireRank


def run_rank(data: bytes) -> int:
    """In an actor's process: be a rank until the engine ends it."""
    from quire.config.log import configure_logging
    from quire.engine.executors.rank import serve_rank

    start: StartRank = read_line(data, StartRank)
    part = f"rank {start.rank}: " if start.rank else ""
    configure_logging(start.log_level, for_server=start.logs_as_server, part=part)
    # Its share is of the engine's host so far.
    fit_to_host(start, (start.options["num_threads"] or 1) * start.num_local)
    return serve_rank(start)


def _done(runs: list[Any], timeout_s: float) -> list[Any]:
    import ray

    done: list[Any] = ray.wait(runs, num_returns=len(runs), timeout=timeout_s)[0] if runs else []
    return done


def _cause(run: Any) -> str | None:
    """How an actor ended; None where its rank has told the engine itself."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        ray.get(run)
    except RayTaskError as error:
        remedy = "; install the same Quire on all nodes" * isinstance(error.cause, ImportError)
        return f"failed: {error.cause}{remedy}"
    except RayError as error:
        # The lines before name the actor in Ray's own way.
        return f"died: {str(error).strip().splitlines()[-1]}"
    return None
