"""An engine on two hosts: two network namespaces of this machine, joined by a virtual cable."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from quire import LLM, SamplingParams
from quire.config.device import cpu_device
from quire.config.options import EngineOptions
from quire.engine.executors import distributed, launch, nodes
from quire.engine.executors.channel import Channel
from quire.engine.executors.nodes import NodeProcesses
from quire.engine.startup import find_model, start_engine
from quire.protocol import __version__
from quire.protocol.codec import Decoder, encode
from quire.protocol.errors import QuireError
from quire.protocol.ranks import (
    Connected,
    EngineEnded,
    FromNode,
    JoinNode,
    Refused,
    StartRank,
    StartRanks,
    ToNode,
)
from tests.models.reference import random_tokens
from tests.processes import free_port
from tests.tiny import save_tiny

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 50_000,
    "num_gpu_blocks_override": 4_000,
    "skip_tokenizer_init": True,
    "distributed_timeout_seconds": 120,
}
PROMPT = random_tokens(20, seed=1)
ADDRESSES = ("10.213.7.1", "10.213.7.2")
NOTICED_S = 5.0
"""Each host says within this time that the other one is cut off; steps and phases may take longer
than that by `distributed_timeout_seconds`."""

SCRIPT = """
import sys, time
from quire import LLM, SamplingParams
options, prompt, num_tokens = {options!r}, {prompt!r}, {num_tokens}
try:
    llm = LLM(**options)
    print("ready", flush=True)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)
    print("tokens", list(output.outputs[0].token_ids), flush=True)
    llm.shutdown()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program, which does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        out: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(words, text=True, **out))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=60)  # with its ranks


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@dataclass
class Hosts:
    """Commands that run on host 0 and on host 1."""

    names: tuple[str, str]
    begin: Start

    def start(self, host: int, *words: str) -> subprocess.Popen[str]:
        return self.begin("ip", "netns", "exec", self.names[host], *words)

    def cut(self) -> None:
        run("ip", "-n", self.names[1], "link", "set", "cable1", "down")
        run("ip", "-n", self.names[0], "link", "set", "cable0", "down")


@pytest.fixture
def hosts(start: Start) -> Iterator[Hosts]:
    names = (f"quire-a-{os.getpid()}", f"quire-b-{os.getpid()}")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    try:
        run("ip", "netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr!r:.200}")
    try:
        run("ip", "netns", "add", names[1])
        run("ip", "-n", names[0], "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        run("ip", "-n", names[0], "link", "set", "cable1", "netns", names[1])
        for i, name in enumerate(names):
            run("ip", "-n", name, "addr", "add", f"{ADDRESSES[i]}/24", "dev", f"cable{i}")
            run("ip", "-n", name, "link", "set", f"cable{i}", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield Hosts(names, start)
    finally:
        for name in names:
            found = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama", max_position_embeddings=100_000)
    return folder


def head(model: Path, num_tokens: int, **changes: Any) -> str:
    options = {"model": str(model), **OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, **changes}
    script = SCRIPT.format(options=options, prompt=PROMPT, num_tokens=num_tokens)
    return textwrap.dedent(script)


def follower(model: Path, *words: str, timeout_s: int = 120) -> list[str]:
    return [
        *(sys.executable, "-m", "quire", "serve", "--model", str(model), "--nnodes", "2"),
        *("--node-rank", "1", "--tensor-parallel-size", "2"),
        *("--distributed-timeout-seconds", str(timeout_s), *words),
    ]


def output_of(process: subprocess.Popen[str], timeout_s: float = 240) -> str:
    return process.communicate(timeout=timeout_s)[0]


def read_up_to(words: str, process: subprocess.Popen[str]) -> str:
    """What it writes until a line has these words in it."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it did not say {words!r}: {said}")


def tokens_of_one_host(model: Path) -> list[int]:
    with LLM(model=str(model), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)


def test_two_hosts_and_a_cut(hosts: Hosts, model: Path) -> None:
    """The same tokens as on one host; then the cable is cut in the middle of a request, and both
    sides say so."""
    expected = tokens_of_one_host(model)
    place = ("--master-addr", ADDRESSES[0])
    second = hosts.start(1, *follower(model, *place))
    first = hosts.start(0, sys.executable, "-c", head(model, 40, master_addr=ADDRESSES[0]))
    said = output_of(first)
    assert f"tokens {expected}" in said, said
    assert second.wait(60) == 0, "it ends with its engine"

    second = hosts.start(1, *follower(model, *place))
    first = hosts.start(0, sys.executable, "-c", head(model, 45_000, master_addr=ADDRESSES[0]))
    read_up_to("ready", first)
    time.sleep(1)
    cut = time.monotonic()
    hosts.cut()
    said = read_up_to("EngineDeadError", first)
    assert time.monotonic() - cut < NOTICED_S and "rank 1" in said, said
    read_up_to(f"host 0 ({ADDRESSES[0]}:29501) is lost", second)
    assert time.monotonic() - cut < NOTICED_S


def test_hosts_without_ipv4(hosts: Hosts, model: Path) -> None:
    for i, name in enumerate(hosts.names):
        run("ip", "-n", name, "addr", "flush", "dev", f"cable{i}")
        address = f"fd00:213:7::{1 + i}/64"
        run("ip", "-n", name, "addr", "add", address, "dev", f"cable{i}", "nodad")
    second = hosts.start(1, *follower(model, "--master-addr", "fd00:213:7::1"))
    first = hosts.start(0, sys.executable, "-c", head(model, 40, master_addr="fd00:213:7::1"))
    said = output_of(first)
    assert f"tokens {tokens_of_one_host(model)}" in said, said
    assert second.wait(60) == 0


@pytest.mark.parametrize(
    ("head_changes", "words", "cause"),
    [
        (
            {"max_num_seqs": 8},
            ("--max-num-seqs", "9"),
            r"was started with max_num_seqs=9, host 0 with max_num_seqs=8",
        ),
        ({}, ("--model", "another/model"), r"was started with model='another/model'"),
    ],
)
def test_hosts_that_do_not_agree(
    head_changes: dict[str, Any], words: tuple[str, ...], cause: str, model: Path, start: Start
) -> None:
    """Both sides say what differs; on one machine, as no network is needed for that."""
    port = free_port()
    second = start(*follower(model, "--master-port", str(port), *words))
    first = start(sys.executable, "-c", head(model, 4, master_port=port, **head_changes))
    assert cause in output_of(first)
    assert cause in output_of(second) and second.returncode != 0


@pytest.mark.parametrize(
    "given",
    [
        {"max_model_len": -1},
        {"max_model_len": "auto", "kv_cache_memory_bytes": "32MiB"},
        {"kv_cache_dtype": "fp8", "dtype": "half"},
        {"max_num_batched_tokens": 100_000, "max_num_seqs": 8, "quantization": "int8"},
        {"speculative_config": {"model": "the-model", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": "ngram", "num_speculative_tokens": 3}},
        {"enable_lora": True, "max_lora_rank": 8, "hf_overrides": {"rope_theta": 1.0}},
        {"max_steps_in_flight": 2, "reservation": "max_length", "attention_backend": "cpu"},
    ],
)
def test_same_commands_on_two_hosts(given: dict[str, Any], model: Path) -> None:
    """Host 0 resolves its options, and compares those that it was given. An option of the second
    host alone is named."""
    drafts = given.get("speculative_config")
    if drafts and drafts["model"] == "the-model":
        given = {**given, "speculative_config": {**drafts, "model": str(model)}}
    said = {"model": str(model), "device": "cpu", "nnodes": 2, "tensor_parallel_size": 2}
    options = EngineOptions.from_arguments(**said, **given)
    on_node = EngineOptions.from_arguments(**said, **given, node_rank=1, num_threads=3)
    compared: list[str | None] = []

    def compare(resolved: EngineOptions, options: EngineOptions, **_: Any) -> Any:
        assert resolved.device.num_threads is not None
        for node in (on_node, on_node.replace(block_size=32)):
            message = JoinNode(1, "b", __version__, node.flat())
            sent = Decoder(FromNode).decode(encode(message))
            compared.append(nodes.difference(sent, options))
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "DistributedExecutor", compare)
        with pytest.raises(Stopped):
            start_engine(options.for_server(), find_model(options))
    assert compared[0] is None
    assert "was started with block_size=32, host 0 with block_size=16" in str(compared[1])


class Stopped(Exception):
    """What a test asks of a start-up has been seen."""


def test_other_version(model: Path, start: Start) -> None:
    port = str(free_port())
    other = "import quire.protocol as p; p.__version__ = '9.9'; from quire.cli import main; main()"
    words = [sys.executable, "-c", other, *follower(model, "--master-port", port)[3:]]
    second = start(*words)
    first = start(sys.executable, "-c", head(model, 4, master_port=int(port)))
    assert "runs Quire 9.9, host 0 runs" in output_of(first)
    assert "runs Quire 9.9, host 0 runs" in output_of(second)


@pytest.mark.parametrize(
    ("changes", "file"),
    [({"rms_norm_eps": 1e-3}, "config.json"), ({"seed": 1}, "model.safetensors")],
    ids=["configuration", "weights"],
)
def test_other_files(
    changes: dict[str, Any], file: str, hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    """Under the same name: the second host has another model mounted there."""
    save_tiny(tmp_path, "llama", max_position_embeddings=100_000, **changes)
    words = follower(model, "--master-addr", ADDRESSES[0])
    mounting = f'mount --bind {tmp_path} {model} && exec "$@"'
    second = hosts.start(1, "unshare", "-m", "sh", "-c", mounting, "sh", *words)
    first = hosts.start(0, sys.executable, "-c", head(model, 4, master_addr=ADDRESSES[0]))
    said = output_of(first)
    cause = rf"rank 1 \(.* reads another model than rank 0 \(.*: {file} is not"
    assert re.search(cause, said), said
    second.wait(60)


@pytest.mark.parametrize("way", ["memory", "gloo"])
def test_small_shared_memory(way: str, hosts: Hosts, model: Path) -> None:
    """Nothing of ours lies in /dev/shm."""
    script = head(model, 4, nnodes=1)
    if way == "gloo":
        ours = "from quire.engine.executors import launch\n"
        script = f"{ours}launch.share_memory = lambda device: False\n{script}"
    mounting = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    words = ("unshare", "-m", "sh", "-c", mounting, "sh", sys.executable, "-c", script)
    said = output_of(hosts.start(0, *words))
    assert "tokens [" in said, said


def test_host_that_does_not_come(model: Path, start: Start) -> None:
    options = {"distributed_timeout_seconds": 10, "master_port": free_port()}
    said = output_of(start(sys.executable, "-c", head(model, 4, **options)))
    assert "No host has joined as node_rank 1 of nnodes=2" in said, said
    assert "(distributed_timeout_seconds)" in said


def test_engine_that_does_not_come(model: Path, start: Start) -> None:
    words = follower(model, "--master-port", str(free_port()), timeout_s=2)
    process = start(*words)
    said = output_of(process)
    assert process.returncode != 0
    assert "does not answer for 2 s" in said and "--node-rank 0" in said, said


def test_host_waits_for_the_next_engine(model: Path, start: Start) -> None:
    """A rank dies: the engine ends, and the hosts join the one that takes its place."""
    port = free_port()
    second = start(*follower(model, "--master-port", str(port)))
    first = start(sys.executable, "-c", head(model, 45_000, master_port=port))
    read_up_to("ready", first)
    words = ["pgrep", "-f", "-P", str(second.pid), "quire.engine.executors.rank"]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    os.kill(int(found.stdout), signal.SIGKILL)
    said = output_of(first)
    assert "EngineDeadError" in said and "rank 1" in said and "SIGKILL" in said, said
    said = output_of(start(sys.executable, "-c", head(model, 4, master_port=port)))
    assert "tokens" in said, said
    said = output_of(second)
    assert second.returncode == 0 and "is lost; waiting for it" in said, said


def test_what_a_host_keeps_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token, its folder, its way to host 0, and its processors, which its ranks divide."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(launch, "core_shares", lambda count: [[i] for i in range(count)])
    monkeypatch.setattr(nodes, "cpu_device", lambda: replace(cpu_device(), num_threads=6))

    def settled(**given: Any) -> StartRank:
        told = {"device": "cpu", "num_threads": 100, "hf_token": None, "download_dir": "/other"}
        start = StartRank(5, told, Connected("a", 1, "secret"), ("a", 2), 1, num_local=2)
        nodes.fit_to_node(start, EngineOptions().replace(master_addr="fd00::1", **given))
        assert isinstance(start.channel, Connected)
        assert (start.channel.host, start.channel.port, start.store) == (
            "fd00::1",
            1,
            ("fd00::1", 2),
        )
        assert start.processors == [1]
        return start

    start = settled(hf_token="hf_secret", num_threads=8, download_dir="/models")
    assert start.options["hf_token"] == "hf_secret"
    assert (start.options["num_threads"], start.options["download_dir"]) == (4, "/models")
    assert start.stays_awake
    start = settled()
    assert (start.options["num_threads"], start.options["download_dir"]) == (3, "/other")
    assert not settled(num_threads=16).stays_awake


def test_stages_on_hosts_of_their_own(model: Path, start: Start) -> None:
    """Ranks of one stage share memory where their host has them all, and give the same tokens."""
    port = free_port()
    words = ("--master-port", str(port), "--pipeline-parallel-size", "2")
    second = start(*follower(model, *words))
    options = {"master_port": port, "pipeline_parallel_size": 2}
    script = head(model, 40, **options).replace(
        "    llm.shutdown()", "    time.sleep(100)\n    llm.shutdown()"
    )
    first = start(sys.executable, "-c", script)
    said = read_up_to("tokens [", first)
    assert f"tokens {tokens_of_one_host(model)}" in said, said
    for host in (first, second):
        ranks = ranks_of(host)
        assert len(ranks) == 2
        for pid in ranks:
            assert "memfd:quire-ranks" in Path(f"/proc/{pid}/maps").read_text()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    words = ["pgrep", "-f", "-P", str(process.pid), "quire.engine.executors.rank"]
    return [int(pid) for pid in subprocess.run(words, capture_output=True).stdout.split()]


def test_server_that_starts_its_engine_again(model: Path, start: Start) -> None:
    """A rank of the other host dies in service, and the next one while the engine is started again:
    the host stays for the third engine, and ends with the server."""
    port, meeting = free_port(), free_port()
    words = ("--master-port", str(meeting), "--max-model-len", "512", "--device", "cpu")
    second = start(*follower(model, *words, timeout_s=60))
    serve = [word for word in follower(model, *words, timeout_s=60) if word != "--node-rank"]
    serve.remove("1")
    first = start(*serve, "--port", str(port))

    def status() -> int:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as reply:
                return int(reply.status)
        except HTTPError as error:
            return error.code
        except OSError:
            return 0

    wait_for(lambda: status() == 200)
    (rank,) = ranks_of(second)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: status() == 503)
    wait_for(lambda: bool(set(ranks_of(second)) - {rank}))
    (again,) = set(ranks_of(second)) - {rank}
    os.kill(again, signal.SIGKILL)
    wait_for(lambda: status() == 200 and again not in ranks_of(second))
    first.send_signal(signal.SIGTERM)
    said, said_by_second = output_of(first), output_of(second)
    assert first.returncode == 0, said
    assert second.returncode == 0, said_by_second
    assert said.count("is started again") == 2, said
    assert len(re.findall(r"is lost; waiting for it: .*SIGKILL", said_by_second)) == 2


@pytest.fixture
def host_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcesses]:
    """Of two hosts, without the ranks of its own."""
    monkeypatch.setattr(launch.RankProcesses, "start", lambda *arguments: None)
    options = EngineOptions().replace(
        nnodes=2, tensor_parallel_size=2, master_port=free_port(), device="cpu"
    )
    processes = NodeProcesses(options, options)
    yield processes
    processes.stop()


def greet(host: NodeProcesses, node_rank: int = 1) -> Channel:
    line = socket.create_connection(("127.0.0.1", host.listener.port), 10)
    channel = Channel(line)
    channel.send(encode(JoinNode(node_rank, "b", __version__, host._options.flat())))
    return channel


def answer(channel: Channel) -> Any:
    data = channel.read()
    return None if data is None else Decoder(ToNode).decode(data)


def test_host_that_is_lost_while_it_joins(
    host_0: NodeProcesses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come again, as nothing runs there yet; from then on its ranks are lost with it."""
    send, num_failures = Channel.send, 0

    def send_or_fail(channel: Channel, data: bytes) -> None:
        nonlocal num_failures
        if b"StartRanks" in data and not num_failures:
            num_failures += 1
            raise BrokenPipeError("gone")
        send(channel, data)

    monkeypatch.setattr(Channel, "send", send_or_fail)
    assert answer(greet(host_0)) is None
    wait_for(lambda: "node_rank=1) is lost: gone" in caplog.text)
    wait_for(lambda: "No host has joined as node_rank 1" in host_0.missing())
    assert host_0.ended() == {}
    again = greet(host_0)
    assert isinstance(answer(again), StartRanks)
    assert isinstance(answer(greet(host_0)), Refused), "its place is taken"
    again.close()
    wait_for(lambda: "cannot be reached any more" in host_0.ended().get(1, ""))


def test_greeting_of_something_else(
    host_0: NodeProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as another version with other messages."""
    with socket.create_connection(("127.0.0.1", host_0.listener.port), 10) as line:
        Channel(line).send(b"no message of ours")
        assert line.recv(1) == b""
    wait_for(lambda: "a connection from 127.0.0.1:" in caplog.text)


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([EngineEnded()], 0),
        ([EngineEnded("no room", False)], "host 0 .* did not start: no room"),
        ([EngineEnded("a rank died", True), EngineEnded("no room", False), EngineEnded()], 0),
        ([None, EngineEnded("no room", False), EngineEnded()], 0),
    ],
    ids=["wanted", "first-start", "failed-restart", "lost"],
)
def test_how_a_host_ends(
    ends: list[EngineEnded | None], outcome: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays for an engine that is started again, however often that fails; a first start that
    fails, and an end that was meant, are final."""
    monkeypatch.setattr(nodes, "RETRY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        options = EngineOptions().replace(
            nnodes=2, node_rank=1, tensor_parallel_size=2, master_port=listening.getsockname()[1]
        )

        def be_host_0() -> None:
            for end in ends:
                channel = Channel(listening.accept()[0])
                channel.read()
                channel.send(encode(StartRanks([])))
                if end is not None:
                    channel.send(encode(end))
                    channel.line.shutdown(socket.SHUT_WR)
                    while channel.read() is not None:
                        pass
                channel.close()

        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(be_host_0)
            if isinstance(outcome, str):
                with pytest.raises(QuireError, match=outcome):
                    nodes.run_node(options)
            else:
                assert nodes.run_node(options) == outcome
            serving.result(30)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_port_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes the connection, and says nothing."""
    monkeypatch.setattr(nodes, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = EngineOptions().replace(
            nnodes=2, node_rank=1, tensor_parallel_size=2, master_port=silent.getsockname()[1]
        )
        with pytest.raises(QuireError, match=r"not answered for 0\.2 s.*master_port"):
            nodes.run_node(options)


def test_port_in_use(model: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = output_of(start(sys.executable, "-c", head(model, 4, master_port=port)))
    assert "OptionError" in said and f"master_port={port}" in said and "free port" in said, said
