"""What is timed and against whom: ``python -m fusewright_testkit.bench optimizer``."""

from __future__ import annotations

from fusewright_testkit import Case

from . import adamw, learned, matrices, peers
from .steps import Stepped

# The picture's optimizers, with all of their cases: those that another one computes, too.
PICTURED = {
    "AdamW": "",
    "AdamW with clipping": "",
    "Muon": "",
    "M3": "",
    "DeltaMomentum": "",
    "DeepMomentum": "",
}
PARTS = adamw, matrices, learned


def cases() -> list[Case]:
    return [case for part in PARTS for case in part.cases()]


def providers() -> dict[str, dict[str, Stepped]]:
    """Ours, torch's and other libraries', by op."""
    merged: dict[str, dict[str, Stepped]] = {}
    for part in PARTS:
        for name, ops in part.providers().items():
            merged[name] = merged.get(name, {}) | ops
    return merged | peers.providers()
