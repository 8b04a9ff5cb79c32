"""Layouts of a tensor's memory: each the same numbers, but for rows that are repeated."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def amid_memory(x):
    return F.pad(x.flatten(), (1, 0))[1:].view_as(x)


def of_a_wider_axis(x):
    return F.pad(x, (0, 8))[..., : x.shape[-1]]


def of_an_odd_axis(x):
    return F.pad(x, (1, 0))[..., 1:]


def every_other_row(x):
    return torch.stack([x, x], 1).flatten(0, 1)[::2]


def every_other_token(x):
    return torch.stack([x, x], 2).flatten(1, 2)[:, 1::2] if x.ndim > 2 else x


def first_of_fused_heads(x):
    axis = max(x.ndim - 2, 1)
    return torch.stack([x, x, x], axis).select(axis, 0)


def heads_before_tokens(x):
    return x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.ndim > 2 else x


def gap_in_the_last_axis(x):
    return torch.stack([x, x], -1)[..., 0]


def last_axis_first(x):
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def columns_before_rows(x):
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order)


def repeated_rows(x):
    return x[:1].expand(x.shape)


def one_number(x):
    return x.flatten()[0].expand(x.shape)


EVERY = (
    amid_memory,
    of_a_wider_axis,
    of_an_odd_axis,
    every_other_row,
    every_other_token,
    first_of_fused_heads,
    heads_before_tokens,
    gap_in_the_last_axis,
    last_axis_first,
    columns_before_rows,
    repeated_rows,
    one_number,
)
