"""What is timed and against whom: ``python -m fusewright.optimizer.bench`` prints a short table of
this machine's GPU.
"""

from __future__ import annotations

import sys

import torch

from . import _bench_adamw, _bench_learned, _bench_matrices
from ._bench_steps import Case, Stepped

PARTS = _bench_adamw, _bench_matrices, _bench_learned


def cases() -> list[Case]:
    return [case for part in PARTS for case in part.cases()]


def providers() -> dict[str, dict[str, Stepped]]:
    """Ours and others, by op."""
    found: dict[str, dict[str, Stepped]] = {}
    for part in PARTS:
        for name, ops in part.providers().items():
            found[name] = found.get(name, {}) | ops
    return found


def main() -> int:
    """Print what a step takes on this machine's GPU."""
    if not torch.cuda.is_available():
        print("fusewright.optimizer.bench: needs a CUDA device, torch sees none", file=sys.stderr)
        return 1
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds of a step,")
    print("the host's time to launch it included.")
    for case in cases():
        for name, ops in providers().items():
            if case.op in ops and name != "compile":
                step = ops[case.op].prepare(case.inputs("cuda"))
                ms = do_bench(step, return_mode="median")
                print(f"{case.op:20}{case.sizes} {case.dtype} {name:24}{ms:9.3f}", flush=True)
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
