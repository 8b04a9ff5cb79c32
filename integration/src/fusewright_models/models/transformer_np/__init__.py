"""TransformerNP, its shape and its layers."""

from __future__ import annotations

from ...choices import Norm
from .joint import JointSample, joint_log_likelihood, sample_jointly
from .layers import TransformerNPConfig
from .model import EncodedContext, Prediction, TransformerNP

__all__ = [
    "EncodedContext",
    "JointSample",
    "Norm",
    "Prediction",
    "TransformerNP",
    "TransformerNPConfig",
    "joint_log_likelihood",
    "sample_jointly",
]
