"""The conformance suite: what holds of every package and of every operation.

A package's ``tests/operations.py`` states PACKAGE, OPERATIONS and FORMS: forms are operations with
other options, of which registration, derivatives and compilation are asked once more. Its
``tests/test_conformance.py`` brings the tests in from ``suite``; ids spell operation, dtype and
sizes.
"""

from __future__ import annotations

from .records import Operation, Package, everything, is_float, ramp, same_bits

__all__ = ["Operation", "Package", "everything", "is_float", "ramp", "same_bits"]
