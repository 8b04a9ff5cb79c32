"""Language models on tasks: ``python -m fusewright_models.evaluation`` is lm-eval's program with
the model ``fusewright``.

    python -m fusewright_models.evaluation --model fusewright --tasks lambada_openai \
        --model_args pretrained=runs/titan-mac-mac-20260131-120000-5f3a9c

``Scorer`` and ``load_scorer`` need no lm-eval.
"""

from __future__ import annotations

from .loading import load_scorer
from .scoring import Scorer

__all__ = ["Scorer", "load_scorer"]
