"""What a warm-up leaves in Triton's cache, held against what real calls leave there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

CALL = """
import hashlib
results = [function(*inputs)]
results[0].backward()
results += [x.grad for x in leaves if x.grad is not None]
parts = (x.detach().flatten().contiguous().view(torch.uint8).cpu() for x in results)
bits = b"".join(x.numpy().tobytes() for x in parts)
assert len(results) > 1
assert all(x.isfinite().all() and x.any() for x in results[:2])
print(hashlib.sha256(bits).hexdigest())
"""


def assert_warm_up_compiles_what_calls_compile(case: str, folder: pathlib.Path) -> None:
    """After a warm-up in one process the first call of another compiles nothing, and has the bits
    that it has in a third one, without a warm-up, which compiles the same.

    Args:
        case: code that imports torch and ``warm_up`` and draws on the GPU ``inputs`` for a
            ``function``, whose result is one number, and ``leaves``, those that get a gradient.
        folder: an empty one.

    Raises:
        AssertionError: that is not so.
    """
    warm, cold = folder / "warm", folder / "cold"
    count = int(printed(case + "print(warm_up(function, *inputs))\n", warm))
    kept = files(warm)
    assert 0 < count == sum(name.endswith(".cubin") for name in kept)
    bits = printed(case + CALL, warm)
    assert files(warm) == kept, "a first call compiled after the warm-up"
    assert bits == printed(case + CALL, cold), "a warm-up changed the numbers"
    assert files(cold) == kept, "a warm-up compiled other kernels than calls do"


def printed(code: str, cache: pathlib.Path) -> str:
    """What a process prints whose Triton has this cache."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files(cache: pathlib.Path) -> set[str]:
    """All that is in a cache, by names that say what it was compiled from."""
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
