"""Models of ``transformers`` on the kernels of the fusewright packages (extra "transformers")."""

from .patched import PARTS, USUAL, Part, Patch, patch

__all__ = ["PARTS", "USUAL", "Part", "Patch", "patch"]
