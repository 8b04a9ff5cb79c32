"""lm-eval's own program, which knows the model ``fusewright``."""

from __future__ import annotations

import sys
from importlib import import_module

from ..extras import imported


def main() -> None:
    try:
        imported("lm_eval", extra="eval", purpose="evaluations")
    except RuntimeError as error:
        sys.exit(str(error))
    # It registers the model.
    import_module(".adapter", __package__)
    import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
