"""Types are asked for in the modules that a package's public names come from."""

from __future__ import annotations

import public_types
import pytest

INIT = """
from ._core.backends import Backend
from .row_norm.rms_norm import rms_norm
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


def test_public_modules_are_those_that_the_package_imports_from():
    assert public_types.public_modules("fusewright.norm", INIT) == [
        "fusewright.norm._core.backends",
        "fusewright.norm.row_norm.rms_norm",
        "fusewright.norm.reference",
    ]


def test_only_exported_symbols_of_public_modules_count():
    told = public_types.untyped(
        report(
            symbol("fusewright.norm.row_norm.rms_norm.rms_norm"),
            symbol("fusewright.norm.row_norm.rms_norm.RMSNorm.forward", known=False),
            symbol("fusewright.norm.row_norm.rms_norm.EPS", ambiguous=True),
            symbol("fusewright.norm.row_norm.rms_norm._Norm", known=False, exported=False),
            symbol("fusewright.norm.row_norm.launch.ForwardPlan", known=False),
        ),
        ["fusewright.norm.row_norm.rms_norm"],
    )
    assert told == [
        "fusewright.norm.row_norm.rms_norm.RMSNorm.forward: is missing",
        "fusewright.norm.row_norm.rms_norm.EPS: is missing",
    ]


def test_a_report_on_nothing_is_an_error():
    with pytest.raises(ValueError, match="without symbols"):
        public_types.untyped(report(), [])
