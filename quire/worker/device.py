"""Which device a worker runs on."""

from __future__ import annotations

import torch

from quire.config.device import DeviceInfo, cpu_device, cpu_threads
from quire.protocol.errors import OptionError


def detect_device(wanted: str) -> DeviceInfo:
    """The GPU if there is one and it is not unwanted, else the CPU."""
    if wanted == "cpu":
        return cpu_device()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return DeviceInfo(
            "cuda",
            torch.cuda.get_device_name(),
            total,
            free,
            cpu_threads(),
            torch.cuda.is_bf16_supported(including_emulation=False),
        )
    if wanted == "cuda":
        raise OptionError(
            "device='cuda' was asked for, but torch finds no CUDA GPU; check the driver and that "
            "torch was installed with CUDA, or leave device unset to use the CPU."
        )
    return cpu_device()
