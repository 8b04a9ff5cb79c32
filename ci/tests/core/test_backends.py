"""Which GPUs the kernels refuse, and with what reason."""

from __future__ import annotations

import pytest
import torch
from fusewright.example._core import backends

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as torch tells of one, by its compute capability and the platform that torch is for."""

    def told(capability: tuple[int, int], hip: str | None = None) -> str | None:
        monkeypatch.setattr(backends, "has_triton", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        return backends.known_obstacle.__wrapped__(GPU, torch.bfloat16)

    return told


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_compute_capability_8_and_up_is_served(gpu, capability):
    assert gpu(capability) is None


def test_a_capability_below_8_is_refused_by_its_number(gpu):
    told = gpu((7, 5))
    assert told == "cuda:0 has compute capability (7, 5), the kernels need (8, 0) or more"


def test_a_gpu_of_amd_is_refused_though_its_number_is_large_enough(gpu):
    told = gpu((9, 4), hip="7.1.0")
    assert told == "torch is built for HIP 7.1.0, the kernels need CUDA"
