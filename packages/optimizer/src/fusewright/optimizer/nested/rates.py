r"""Learning rates of parameter groups, kept on the device:

    lr_g = base_lr_g m_g    m = controller(norm of gradients, norm of parameters, depth)

with the mean of the losses, which decays by a tenth a step, and whether a step is taken. Where the
loss is not finite only the learning rates change. The device selects; the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._core.backends import Backend, uses_triton
from ..common.placement import on
from ..common.tables import Uploaded, upload
from . import launch
from .nested_controller import NestedController
from .reference import by_group

Tensor = torch.Tensor
EMA_RATE = 0.1


class GroupRates:
    """The rates that a controller sets.

    Attributes:
        multipliers: ``[groups]`` in the controller's dtype.
        rates: ``[groups]``, fp64: the learning rates.
        statistics: ``[groups, 3]``, the controller's inputs for the multipliers.
        ema_loss: 0-d; NaN before the first finite loss.
        found_inf: 0-d fp32: 1 where the step is skipped for its loss or by a scaler.
    """

    def __init__(
        self,
        controller: NestedController,
        depths: Sequence[float],
        device: torch.device,
        backend: Backend,
    ) -> None:
        self.controller, self.device = controller, device
        weight = controller.linears[0].weight
        like: dict[str, Any] = dict(dtype=weight.dtype, device=device)
        count = len(depths)
        self.multipliers = torch.ones(count, **like)
        self.rates = torch.zeros(count, dtype=torch.float64, device=device)
        self.depths = upload(depths, weight.dtype, device)
        self.statistics = torch.zeros(count, 3, **like)
        self.statistics[:, 2] = self.depths
        self.ema_loss = torch.full((), float("nan"), **like)
        self.found_inf = torch.zeros((), device=device)
        self.base_numbers = Uploaded(count, torch.float64, device)
        self.base = self.base_numbers.table
        self.losses = Uploaded(1, weight.dtype, device)
        self.launch: launch.Control | None = None
        in_fp32 = uses_triton(weight, backend) and weight.dtype == torch.float32
        if in_fp32 and controller.hidden <= launch.WIDEST:
            self.launch = launch.Control(controller, count, device)

    def hold(self, base: Sequence[float | Tensor]) -> None:
        """Take the groups' learning rates before multipliers."""
        there = [isinstance(x, Tensor) and x.device == self.device for x in base]
        numbers = zip(base, there, strict=True)
        self.base_numbers.hold([0.0 if on_device else float(x) for x, on_device in numbers])
        self.base = self.base_numbers.table
        if any(there):
            triples = zip(base, self.base.unbind(), there, strict=True)
            chosen: list[Any] = [x if on_device else number for x, number, on_device in triples]
            self.base = torch.stack([x.double().reshape(()) for x in chosen])

    def loss_of(self, loss: float | Tensor) -> Tensor:
        """0-d on the device."""
        dtype = self.statistics.dtype
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss must be one number, got shape {list(loss.shape)}")
            if loss.device == self.device:
                return loss.detach().to(dtype).reshape(())
            if not loss.is_cpu:
                return on(self.device, loss.detach()).to(dtype).reshape(())
        self.losses.hold([float(loss)])
        return self.losses.table[0]

    def update(
        self,
        squares: Tensor | None,
        owner: Tensor | None,
        loss: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Take the squares of gradients and parameters, ``[2, partials]`` in fp64, with the group
        of each partial sum, ``owner``; None leaves the multipliers as they are.
        """
        if self.launch is not None:
            inputs = self.depths, self.base, loss, grad_scale, found_inf
            outputs = self.statistics, self.multipliers, self.rates, self.ema_loss, self.found_inf
            self.launch(squares, owner, (*inputs, *outputs))
            return
        goes_on = loss.isfinite()
        if squares is not None:
            statistics = self.statistics_of(squares, owner, grad_scale)
            multipliers = self.controller(statistics)
            self.statistics.copy_(torch.where(goes_on, statistics, self.statistics))
            self.multipliers.copy_(torch.where(goes_on, multipliers, self.multipliers))
        self.rates.copy_(self.base * self.multipliers)
        ema = self.ema_loss
        later = torch.where(ema.isnan(), loss, ema + EMA_RATE * (loss - ema))
        ema.copy_(torch.where(goes_on, later, ema))
        skips = ~goes_on
        if found_inf is not None:
            skips = skips | (found_inf.reshape(()) > 0.0)
        self.found_inf.copy_(skips)

    def by_group(self, partials: Tensor, owner: Tensor | None) -> Tensor:
        """``[partials]`` in fp64 added by group, ``[groups]``."""
        assert owner is not None
        return by_group(partials, owner, len(self.depths))

    def statistics_of(
        self, squares: Tensor, owner: Tensor | None, grad_scale: Tensor | None
    ) -> Tensor:
        """``[groups, 3]``: both norms and the depth."""
        norms = torch.stack([self.by_group(side, owner) for side in squares]).sqrt()
        if grad_scale is not None:
            norms[0] /= grad_scale.double().abs()
        return torch.cat([norms.T.to(self.depths.dtype), self.depths[:, None]], dim=1)
