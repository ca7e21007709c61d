"""Which device a worker runs on, and which GPUs are refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from quire.config.device import DeviceInfo, choose_num_threads, cpu_device
from quire.kernels import cpu
from quire.protocol.errors import OptionError

logger = logging.getLogger(__name__)

WITHOUT_LIBRARY = (
    "{reason}. Without it plain torch does everything: attention, linear layers (their weights are "
    "not packed), norms, rotation and sampling, all layers one by one, several times "
    "slower; GGUF files are dequantised to float32, as computing from quantised weights is slower "
    "still"
)
OLDEST_CAPABILITY = (7, 0)
"""Volta: Triton makes no code for older GPUs of NVIDIA."""


def detect_device(wanted: str, place: int | None = None) -> DeviceInfo:
    """The GPU if there is one and it is not unwanted, else the CPU. Ranks of one host have a
    `place` each, and the GPU of that number."""
    if wanted == "cpu" or not torch.cuda.is_available():
        is_there, reason = cpu.available()
        if not is_there:
            logger.warning("%s", WITHOUT_LIBRARY.format(reason=reason))
        return replace(cpu_device(), has_native_kernels=is_there)
    count = torch.cuda.device_count()
    if place is not None:
        torch.cuda.set_device(place % count)
    index = torch.cuda.current_device()
    name = torch.cuda.get_device_name(index)
    check_triton(name, has_triton=find_spec("triton") is not None)
    if torch.version.hip is None:
        check_capability(name, torch.cuda.get_device_capability(), torch.cuda.get_arch_list())
    threads = choose_num_threads()
    return DeviceInfo(
        "cuda",
        name,
        # Not by `mem_get_info`: an engine whose ranks are elsewhere needs no context on a GPU.
        torch.cuda.get_device_properties(index).total_memory,
        threads.count,
        threads.reason,
        torch.cuda.is_bf16_supported(including_emulation=False),
        index=index,
        count=count,
    )


def check_triton(name: str, has_triton: bool) -> None:
    if not has_triton:
        raise OptionError(
            f"{name} cannot be used: the package triton, which makes the GPU kernels, is not "
            "installed. Install it (pip install triton), or set device='cpu'."
        )


def check_capability(name: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Refuse NVIDIA GPUs that Triton or this build of torch has no code for."""
    found = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        raise OptionError(
            f"{found}, but the GPU kernels need {oldest} (Volta) or newer. Set device='cpu'."
        )
    if built_for and not any(_runs(code, capability) for code in built_for):
        raise OptionError(
            f"{found}, which torch {torch.__version__} was not built for (it has code for "
            f"{', '.join(built_for)}). Install a build of torch that supports this GPU, or set "
            "device='cpu'."
        )


def _runs(code: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU can run `code`: sm_86 runs where the major number is equal and the minor at
    least as high, compute_86 on everything newer."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", code)
    if match is None:
        return False
    kind, target = match[1], (int(match[2]), int(match[3]))
    return target <= capability and (kind == "compute" or target[0] == capability[0])
