"""What holds of the package and of all its operations."""

from __future__ import annotations

from fusewright_testkit.conformance.suite import *  # noqa: F403

from .operations import FORMS, OPERATIONS, PACKAGE  # noqa: F401
