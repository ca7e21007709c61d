"""Groups and links of ranks on a GPU: NCCL inside CUDA graphs, and several ranks on one GPU.

One GPU cannot show NCCL between ranks: `multi_gpu` tests need two.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.groups import new_store

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200
JOIN = '''
import sys
import torch
import torch.distributed as dist
from quire.config.options import ParallelOptions
from quire.protocol.errors import OptionError
from quire.protocol.ranks import Connected, StartRank
from quire.worker.device import detect_device
from quire.worker.groups import join

rank, tp, pp, port, index = map(int, sys.argv[1:])
options = ParallelOptions(
    tensor_parallel_size=tp, pipeline_parallel_size=pp, distributed_timeout_seconds=100
)
start = StartRank(rank, {}, Connected("", 0, ""), store=("127.0.0.1", port))
device = detect_device("cuda", index)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

def numbers(rank, step, dtype, shape=(33, 65)):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(shape, generator=generator).to(dtype).cuda(index)

def pass_on():
    """What one stage sends the next has, in order and as it was."""
    link = parallel.stage.link
    for step in range(20):
        for dtype in DTYPES:
            shape = (1 + 300 * (step % 3), 64)
            if parallel.stage.is_first:
                x = numbers(0, step, dtype, shape)
                link.send(x)
                x.fill_(-1)
            else:
                out = link.receive(torch.empty(shape, dtype=dtype, device=f"cuda:{index}"))
                assert torch.equal(out, numbers(0, step, dtype, shape)), (step, dtype)
'''
CAPTURE = """
parallel = join(start, options, device)
group = parallel.group  # `Parallel` itself would skip what one rank need not do
assert dist.get_backend() == "nccl" and parallel.is_capturable
for dtype in DTYPES:
    x, weight = numbers(0, 1, dtype), numbers(0, 2, dtype, (65, 65)) / 8

    def layers(x):
        y = group.all_reduce(x @ weight)
        gathered = group.all_gather(y @ weight)
        return group.broadcast((gathered[0] + y).relu(), 0)

    def plain(x):
        y = x @ weight
        return ((y @ weight) + y).relu()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(x)
    for step in range(3, 8):
        x.copy_(numbers(0, step, dtype))
        out.zero_()
        graph.replay()
        near = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out, plain(x), atol=near, rtol=near)
torch.cuda.synchronize()
print("done", flush=True)
"""
SHARE = """
parallel = join(start, options, device)
group = parallel.group
assert dist.get_backend() == "gloo" and not parallel.is_capturable or tp == 1
for step in range(5):
    for dtype in DTYPES:
        if tp > 1:
            x = numbers(rank, step, dtype)
            every = [numbers(other, step, dtype) for other in range(tp)]
            total = every[0].float() + every[1].float()
            found = group.all_reduce(x.clone())
            assert found.is_cuda and torch.equal(found, total.to(dtype)), (step, dtype)
            assert torch.equal(group.all_gather(x), torch.stack(every))
            assert torch.equal(parallel.all_gather(x), torch.cat(every, -1))
            part = x[:, ::2]  # not contiguous
            assert torch.equal(group.all_gather(part), torch.stack(every)[:, :, ::2])
            for source in range(tp):
                assert torch.equal(group.broadcast(x.clone(), source), every[source])
        ids = group.broadcast(torch.tensor([rank, step], device="cuda"), 0) if tp > 1 else None
        assert ids is None or ids.tolist() == [0, step]
if pp > 1:
    pass_on()
dist.barrier()
print("done", flush=True)
"""
REFUSE = """
try:
    join(start, options, device)
except OptionError as error:
    print(error, flush=True)
"""
TWO_GPUS = """
parallel = join(start, options, device)
group = parallel.group
assert dist.get_backend() == "nccl" and parallel.is_capturable
for dtype in DTYPES:
    if tp > 1:
        x = numbers(rank, 1, dtype)
        group.all_reduce(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            summed, gathered = group.all_reduce(x.clone()), group.all_gather(x)
        for step in range(5):
            x.copy_(numbers(rank, step, dtype))
            graph.replay()
            every = [numbers(other, step, dtype) for other in range(tp)]
            torch.testing.assert_close(summed, every[0] + every[1])
            assert torch.equal(gathered, torch.stack(every))
if pp > 1:
    pass_on()
dist.barrier()
torch.cuda.synchronize()
print("done", flush=True)
"""
LOOK = """
import torch
from quire.worker.device import detect_device
found = detect_device("cuda")
print(torch._C._cuda_hasPrimaryContext(0))
assert found.total_memory_bytes == torch.cuda.mem_get_info()[1]
print(torch._C._cuda_hasPrimaryContext(0))
"""


def run_ranks(
    program: str, tp: int, pp: int, devices: list[int], environment: dict[str, str]
) -> list[str]:
    """What each rank writes."""
    store = new_store("127.0.0.1", TIMEOUT_S)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", JOIN + program),
                *map(str, (rank, tp, pp, store.port, index)),
            ],
            cwd=ROOT,
            env={**os.environ, **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, index in enumerate(devices)
    ]
    found = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, f"rank {rank}: {err}"
            found.append(out)
    finally:
        for process in processes:
            process.kill()
    return found


SHARED = {"QUIRE_RANKS_SHARE_DEVICES": "1"}


def test_nccl_inside_a_graph() -> None:
    """Replays compute with new inputs: collectives are part of the graph, in order. The process
    ends while the graph is still there."""
    (said,) = run_ranks(CAPTURE, 1, 1, [0], {"QUIRE_RANKS_SHARE_DEVICES": "0"})
    assert said == "done\n"


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_ranks_on_one_gpu(tp: int, pp: int) -> None:
    """By gloo, against plain torch: sums of two are the bits of float32, rounded."""
    assert run_ranks(SHARE, tp, pp, [0, 0], SHARED) == ["done\n"] * 2


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """NCCL would, with less to go by."""
    for said in run_ranks(REFUSE, 2, 1, [0, 0], {"QUIRE_RANKS_SHARE_DEVICES": "0"}):
        assert said.startswith("ranks 0 and 1 have the same GPU of ")
        assert "tensor_parallel_size" in said


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_gpus(tp: int, pp: int) -> None:
    assert run_ranks(TWO_GPUS, tp, pp, [0, 1], {"QUIRE_RANKS_SHARE_DEVICES": "0"}) == ["done\n"] * 2


def test_an_engine_opens_no_context_on_a_gpu() -> None:
    """It looks at the device, whose memory its ranks alone need."""
    words = [sys.executable, "-c", LOOK]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
