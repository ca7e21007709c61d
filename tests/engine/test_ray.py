"""Ranks as actors of a real Ray cluster: two nodes on one host, bound to 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, EngineDeadError, SamplingParams
from quire.config.options import EngineOptions
from quire.engine.executors.ray import RayActors
from quire.protocol.errors import OptionError
from tests.models.reference import random_tokens
from tests.processes import closed_port
from tests.server.running import RunningServer, eventually
from tests.tiny import save_tiny

NODE: Any = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
# So that a node which is gone is not waited for: Ray's own values make it 15 s.
SYSTEM = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
OPTIONS: Any = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 16_000,
    "kv_cache_memory_bytes": "32MiB",
}
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on those systems: loopback alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a token is kept in the home folder
}
PROMPTS: Any = [{"prompt_token_ids": random_tokens(9 + 5 * i, seed=i)} for i in range(3)]
NOTICED_S = 5.0
"""A rank that is gone is noticed within this time; the step itself would wait for it for
`distributed_timeout_seconds`, ten minutes."""
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=15_000, ignore_eos=True)


class Nodes:
    """A cluster, and the processes of ranks on each of its nodes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self.head = self.cluster.add_node(**NODE, _system_config=SYSTEM)
        self.other = self.cluster.add_node(**NODE)

    def rank_pids(self, node: Any = None) -> list[int]:
        """Of a node, or of all."""
        nodes = self.cluster.list_all_nodes() if node is None else [node]
        raylets = {one.all_processes["raylet"][0].process.pid for one in nodes}
        found = []
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if command.startswith(b"ray::QuireRank") and parent in raylets:
                found.append(int(entry.name))
        return sorted(found)

    def assert_free(self) -> None:
        """No rank is left, and nothing is reserved for one."""
        import ray

        eventually(lambda: not self.rank_pids(), "the end of all ranks")
        if ray.is_initialized():
            eventually(
                lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"],
                "the end of the placement group",
            )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="ray-")  # short: paths of sockets are
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        pytest.importorskip("ray")
        from ray._private import ray_constants

        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # it may be imported already
        nodes = Nodes()
        patch.setenv("RAY_ADDRESS", nodes.cluster.address)
        yield nodes
        nodes.cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def connection(nodes: Nodes) -> Iterator[None]:
    """That of a user, who expects to keep it."""
    import ray

    ray.init(address=nodes.cluster.address, log_to_driver=False)
    yield
    assert ray.is_initialized()
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, max_position_embeddings=20_000)
    return str(folder)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    with LLM(model=model, **OPTIONS) as llm:
        return tokens(llm)


def start(model: str, **options: Any) -> LLM:
    parallel: Any = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    return LLM(model=model, **{**OPTIONS, **parallel, **options})


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"needs the package ray .*pip install '\.\[ray\]'"):
        RayActors(EngineOptions())


@pytest.mark.slow
def test_two_nodes(nodes: Nodes, model: str, expected: list[list[int]]) -> None:
    """The same tokens as one process, from a rank on each node. Then an actor is killed in the
    middle of a request: an error names the rank, and nothing is left behind."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    with start(model) as llm:
        (pid,) = nodes.rank_pids(nodes.other)
        assert len(nodes.rank_pids(nodes.head)) == 1
        assert tokens(llm) == expected
        says = rf"rank 1 \(host \S+, process {pid}\): its actor on"
        fail_in_the_middle(llm, lambda: os.kill(pid, signal.SIGKILL), says)
        llm.shutdown()
    assert not ray.is_initialized() and signal.getsignal(signal.SIGTERM) is handler
    nodes.assert_free()


@pytest.mark.slow
@pytest.mark.usefixtures("connection")
def test_ranks_of_a_stage_share_a_node(nodes: Nodes) -> None:
    """Where there is one that is large enough."""
    larger = nodes.cluster.add_node(**{**NODE, "num_cpus": 2})
    options = EngineOptions().replace(device="cpu", num_threads=2, tensor_parallel_size=2)
    try:
        ranks = RayActors(options)
        assert "rank 0 (node 127.0.0.1), rank 1 (node 127.0.0.1)" in ranks.missing()
        eventually(lambda: len(nodes.rank_pids(larger)) == 2, "both ranks")
        ranks.stop()
        nodes.assert_free()
    finally:
        nodes.cluster.remove_node(larger)


@pytest.mark.slow
@pytest.mark.usefixtures("connection")
def test_removed_node(nodes: Nodes, model: str, expected: list[list[int]]) -> None:
    """In the middle of a request, and with it one of two stages. Then there is too little for
    another engine, which is said at once."""

    def remove() -> None:
        nodes.cluster.remove_node(nodes.other, allow_graceful=False)

    try:
        with start(model, tensor_parallel_size=1, pipeline_parallel_size=2) as llm:
            assert tokens(llm) == expected
            fail_in_the_middle(llm, remove, r"rank 1 .*its actor on node 127\.0\.0\.1")
        nodes.assert_free()
        with pytest.raises(OptionError, match=r"need 2 x 1 CPU of the Ray cluster.* 1 CPU on node"):
            start(model)
    finally:
        if nodes.other in nodes.cluster.list_all_nodes():
            nodes.cluster.remove_node(nodes.other, allow_graceful=False)
        nodes.other = nodes.cluster.add_node(**NODE)


@pytest.mark.slow
@pytest.mark.usefixtures("connection")
def test_nothing_free(nodes: Nodes, model: str) -> None:
    """A placement group that the cluster could have, were it not for another program."""
    import ray

    @ray.remote(num_cpus=1)
    class Other:
        def is_there(self) -> bool:
            return True

    other = Other.remote()
    says = r"not placed 2 x 1 CPU within 2 s .*\(1 free in all"
    try:
        assert ray.get(other.is_there.remote())
        with pytest.raises(EngineDeadError, match=says):
            start(model, distributed_timeout_seconds=2)
    finally:
        ray.kill(other)
    nodes.assert_free()


@pytest.mark.slow
@pytest.mark.usefixtures("nodes")
def test_cluster_that_is_gone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_port() as port:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        says = rf"cluster at 127\.0\.0\.1:{port}: .*refused.*ray start"
        with pytest.raises(OptionError, match=says):
            start(model)
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{port}")
    with pytest.raises(OptionError, match=r"RAY_ADDRESS='ray://.*Ray Client"):
        start(model)


@pytest.mark.slow
@pytest.mark.usefixtures("nodes")
def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is started, on this host alone, and ends with the ranks."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS")
        ranks = RayActors(EngineOptions().replace(device="cpu", num_threads=1))
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        assert ranks.ended() == {}
        ranks.stop()
        ranks.stop()
        assert not ray.is_initialized() and ranks.ended() == {}
        eventually(lambda: folder not in processes(), "the end of Ray")


@pytest.mark.slow
def test_server(nodes: Nodes, model: str) -> None:
    """A killed actor ends its stream; health names it; the engine starts again and serves."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    ray = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")
    server = RunningServer.start("--model", model, *flags, *ray)
    try:
        assert server.url, "".join(server.lines)
        client = server.client()
        ask: Any = {"model": client.models.list().data[0].id, "prompt": "Once"}
        first = client.completions.create(**ask, max_tokens=8, temperature=0)
        endless: Any = {"max_tokens": 15_000, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(stream=True, **ask, **endless)
        next(iter(stream))
        (pid,) = nodes.rank_pids(nodes.other)
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match=rf"rank 1 \(host \S+, process {pid}\)"):
            list(stream)
        eventually(lambda: server.request("GET", "/health").status == 503, "the news")
        assert time.monotonic() - struck < NOTICED_S
        assert f"process {pid}" in server.request("GET", "/health").error["message"]
        assert server.request("GET", "/v1/models").status == 503
        eventually(lambda: server.request("GET", "/health").status == 200, "the restart", 200)
        again = client.completions.create(**ask, max_tokens=8, temperature=0)
        assert again.choices[0].text == first.choices[0].text
        assert server.stop() == 0
    finally:
        server.stop()
    nodes.assert_free()


def processes() -> str:
    """The command lines of all."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def fail_in_the_middle(llm: LLM, action: Callable[[], None], says: str) -> None:
    """Do something once a request runs, whose error comes soon."""
    struck: list[float] = []

    def strike() -> None:
        eventually(lambda: llm._core.scheduler.has_work, "a request")
        time.sleep(0.5)
        struck.append(time.monotonic())
        action()

    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(EngineDeadError, match=says):
        llm.generate(PROMPTS, ENDLESS, use_tqdm=False)
    noticed = time.monotonic()
    thread.join()
    assert noticed - struck[0] < NOTICED_S
