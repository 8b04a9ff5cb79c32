"""What the tests and benchmarks of the fusewright packages share. Private: no package depends on it
at run time.
"""

from __future__ import annotations

from .cases import Case
from .graphs import capture, no_synchronisation
from .yardstick import Yardstick, assert_within

__all__ = ["Case", "Yardstick", "assert_within", "capture", "no_synchronisation"]
