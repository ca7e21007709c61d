"""Which device a worker runs on."""

from __future__ import annotations

import torch

from quire.config.device import DeviceInfo, cpu_device, cpu_threads


def detect_device(wanted: str) -> DeviceInfo:
    """The GPU if there is one and it is not unwanted, else the CPU."""
    if wanted != "cpu" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return DeviceInfo(
            "cuda",
            torch.cuda.get_device_name(),
            total,
            free,
            cpu_threads(),
            torch.cuda.is_bf16_supported(including_emulation=False),
        )
    return cpu_device()
