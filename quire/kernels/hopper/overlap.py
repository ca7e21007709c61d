"""Starting a kernel while the one before it ends (programmatic dependent launch, from Hopper on).

Between two kernels of some microseconds the launch of the second, its first instructions and its
first addresses would be a good part of the time; so they are done while the first one finishes.

A kernel that takes part calls `wait_for_inputs` once. What was written by the kernel just before
it may be read, and anything may be written, only behind that call. Weights, and what older kernels
wrote, may be read in front of it: a kernel lets the next one start when its own wait is over, so
all but the last kernel have ended by then.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(tensor: Tensor) -> dict[str, Any]:
    """For a launch on the tensor's device, of a kernel with a parameter OVERLAPS."""
    if tensor.is_cuda and _is_supported(tensor.device):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@cache
def _is_supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
