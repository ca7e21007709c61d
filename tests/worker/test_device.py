"""GPUs that cannot be used are refused with a reason and a remedy, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.protocol.errors import OptionError
from quire.worker.device import check_capability, check_triton, detect_device

# As torch 2.11 for CUDA 13 has it, and an older build with intermediate code for newer GPUs.
RECENT = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
OLDER = ("sm_50", "sm_70", "sm_80", "compute_80")
KERNELS = Path(__file__).parents[2] / "quire" / "kernels" / "triton"


@pytest.mark.parametrize(
    ("capability", "built_for"),
    [
        ((7, 5), RECENT),  # Turing
        ((8, 0), RECENT),  # Ampere
        ((8, 7), RECENT),
        ((8, 9), RECENT),  # Ada
        ((9, 0), ("sm_90a",)),  # Hopper
        ((10, 0), RECENT),  # Blackwell
        ((12, 1), RECENT),
        ((7, 0), OLDER),  # Volta
        ((9, 0), OLDER),
        ((9, 0), ()),
    ],
)
def test_gpus_that_have_code_are_taken(
    capability: tuple[int, int], built_for: tuple[str, ...]
) -> None:
    check_capability("a GPU", capability, built_for)


@pytest.mark.parametrize(
    ("capability", "built_for", "parts"),
    [
        ((6, 1), OLDER, ("GTX has compute capability 6.1", "need 7.0 (Volta)", "device='cpu'")),
        ((7, 0), RECENT, ("7.0", "not built for", "sm_75, sm_80", "Install", "device='cpu'")),
        ((11, 0), RECENT, ("11.0", "not built for")),
    ],
)
def test_gpus_without_code_are_refused(
    capability: tuple[int, int], built_for: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    with pytest.raises(OptionError) as caught:
        check_capability("GTX", capability, built_for)
    for part in parts:
        assert part in str(caught.value)


def test_a_gpu_without_triton_is_refused() -> None:
    check_triton("a GPU", has_triton=True)
    with pytest.raises(OptionError, match=r"a GPU cannot be used.*pip install triton.*'cpu'"):
        check_triton("a GPU", has_triton=False)


def test_what_is_found_here() -> None:
    assert detect_device("cpu").type == "cpu"
    assert detect_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_kernels_name_no_vendor() -> None:
    """They run on AMD GPUs too: no assembly of one vendor, no functions that only one has."""
    for path in KERNELS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("inline_asm", "extra.cuda", "language.extra", "libdevice", "ptx", "gluon"):
            assert word not in text.lower(), f"{path.name} uses {word}"
