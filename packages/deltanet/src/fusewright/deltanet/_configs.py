"""Launch tables as data: how much of a head one program takes, and which backend is faster.

Lines of the rule and of the convolution are an H200's under triton 3.6, results/tuning-*.csv, by
tune.py and tune_convolution.py; those of the norm, and other cards, are unmeasured.
"""

from __future__ import annotations

from typing import NamedTuple

# What "auto" takes for CUDA tensors where fla can serve too, by whether gradients are wanted.
# Source: results/. By the wall clock ours is faster throughout; in a graph, too, but for training
# with 64 columns, where fla is a twenty-fifth faster.
FASTER = {"forward": "triton", "training": "triton"}


# Columns of keys and of values that the kernels serve: what one program holds of a state.
WIDEST = 256
# Strides and widths in numbers, and addresses in bytes, that are multiples of it are loaded as
# whole vectors. Of others ptxas makes serial kernels for Hopper that read registers which nothing
# has written: such tensors are copied first.
VECTOR = 16


class RuleConfig(NamedTuple):
    """A program takes at most ``block_k`` columns of keys and ``block_v`` of values at a time; on
    cards without Hopper's products at most ``elsewhere`` of both, with eight warps.
    """

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    elsewhere: int = 128


class SerialConfig(NamedTuple):
    """A program carries ``block_v`` columns of a head's state over all chunks; eight warps of it on
    cards without Hopper's products.
    """

    block_v: int
    num_warps: int
    num_stages: int


PREPARE = RuleConfig(block_k=64, block_v=64, num_warps=4, num_stages=3)
OUTPUTS = RuleConfig(block_k=64, block_v=128, num_warps=4, num_stages=2)
LOCAL = RuleConfig(block_k=64, block_v=128, num_warps=4, num_stages=2)
INPUTS = RuleConfig(block_k=64, block_v=64, num_warps=4, num_stages=3, elsewhere=32)
THROUGH = RuleConfig(block_k=64, block_v=64, num_warps=4, num_stages=2)

# From the line of the fewest programs to that of the most: the first serves of which every
# multiprocessor gets one.
STATES = (
    SerialConfig(block_v=64, num_warps=4, num_stages=4),
    SerialConfig(block_v=32, num_warps=4, num_stages=4),
    SerialConfig(block_v=16, num_warps=4, num_stages=4),
)
STATE_GRADIENTS = (
    SerialConfig(block_v=64, num_warps=4, num_stages=3),
    SerialConfig(block_v=32, num_warps=4, num_stages=3),
    SerialConfig(block_v=16, num_warps=4, num_stages=3),
)
# How many columns of a state one program of the decode step takes. For 64 rows of 8 heads 32 are
# 3 % faster, with half as many programs.
STEP_BLOCK_V = 16


class ConvolutionConfig(NamedTuple):
    """A program takes ``elements`` elements of one head, or of so many ``channels``, at a time."""

    elements: int
    channels: int
    num_warps: int


CONVOLUTION = ConvolutionConfig(elements=2048, channels=128, num_warps=4)
CONVOLUTION_BACKWARD = ConvolutionConfig(elements=256, channels=128, num_warps=2)
# Backward a program walks over so many tokens: the first number serves of which every
# multiprocessor gets six programs, and else the last.
STRIPS = (64, 32, 16)
STRIPS_PROGRAMS = 6

# How many elements a program of the gated norm takes, in whole rows.
NORM_ELEMENTS = 2048
NORM_WARPS = 4
