"""torchtitan's program on a CPU, which it does not look for by itself; what it measures goes to a
file.

torchrun torchtitan_on_cpu.py FILE FLAG ...
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch


class Device:
    """torch.cpu, and what torchtitan asks of a GPU beside it."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def get_device_name(self, device=None):
        return "CPU"

    def get_device_properties(self, device=None):
        return SimpleNamespace(total_memory=2**34)

    def memory_stats(self, device=None):
        return {}

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self):
        pass


def main() -> None:
    file = sys.argv.pop(1)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: Device()
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.train import main as train

    lines = []

    def log(self, step, average, greatest, norm, extra_metrics=None):
        lines.append({"step": step, "loss": average, "norm": norm})

    MetricsProcessor.log = log
    train()
    with open(file, "w") as noted:
        json.dump(lines, noted)


if __name__ == "__main__":
    main()
