"""Types are asked for of a package's public names and of what they have."""

from __future__ import annotations

import public_types
import pytest

INIT = """
from ._core.backends import Backend
from .row_norm.rms_norm import rms_norm, RMSNorm
from . import reference
import torch
"""


def symbol(name, known=True, ambiguous=False, exported=True):
    return {
        "name": name,
        "isExported": exported,
        "isTypeKnown": known,
        "isTypeAmbiguous": ambiguous,
        "diagnostics": [{"message": "is missing"}],
    }


def report(*symbols):
    return {"typeCompleteness": {"symbols": list(symbols)}}


def test_public_names_are_those_that_the_package_imports():
    assert public_types.public_names("fusewright.norm", INIT) == [
        "fusewright.norm._core.backends.Backend",
        "fusewright.norm.row_norm.rms_norm.rms_norm",
        "fusewright.norm.row_norm.rms_norm.RMSNorm",
        "fusewright.norm.reference",
    ]


def test_only_exported_symbols_of_public_names_count():
    module = "fusewright.norm.row_norm.rms_norm"
    told = public_types.untyped(
        report(
            symbol(f"{module}.rms_norm"),
            symbol(f"{module}.RMSNorm.forward", known=False),
            symbol(f"{module}.RMSNorm", ambiguous=True),
            symbol(f"{module}.RMSNorm.eps", known=False, exported=False),
            symbol(f"{module}.RMSNormPlan", known=False),
            symbol("fusewright.norm.row_norm.launch.ForwardPlan", known=False),
        ),
        [f"{module}.rms_norm", f"{module}.RMSNorm"],
    )
    assert told == [f"{module}.RMSNorm.forward: is missing", f"{module}.RMSNorm: is missing"]


def test_a_report_on_nothing_is_an_error():
    with pytest.raises(ValueError, match="without symbols"):
        public_types.untyped(report(), [])
