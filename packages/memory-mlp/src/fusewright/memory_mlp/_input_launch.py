"""Both passes between the joint projection and the memory: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ._backends import card_of
from ._input_backward_kernels import _add_shares_kernel, _memory_input_backward_kernel
from ._input_configs import ADD_SHARES, BACKWARD, FORWARD, RunTile, run_tile
from ._input_kernels import _memory_input_kernel
from ._launch import Allocate, Kind, Launch, is_current, kinds, made, memory
from .input_reference import NORM_EPS

Tensor = torch.Tensor


class Problem(NamedTuple):
    """A call as its kernels see it. Without gates it has queries alone."""

    batch: int
    tokens: int
    heads: int
    width: int
    # How many taps; 0 without a convolution.
    taps: int
    key_norm: str | None
    gates: int
    dtype: torch.dtype
    device: torch.device

    @property
    def groups(self) -> int:
        return 3 if self.gates else 1

    @property
    def channels(self) -> int:
        return self.groups * self.heads * self.width

    @property
    def reach(self) -> int:
        return max(self.taps - 1, 0)

    @property
    def block_d(self) -> int:
        return triton.next_power_of_2(self.width)

    def tiles(self, config: RunTile) -> int:
        """Of one row of the batch; one where there are no tokens, for its history goes on."""
        return max(1, triton.cdiv(self.tokens, config.tokens(self.block_d)))

    def programs(self, groups: int, config: RunTile) -> int:
        """Of a launch with ``groups`` programs for every tile of a head."""
        return self.batch * self.tiles(config) * self.heads * groups

    def config(self, table: tuple[RunTile, ...], groups: int) -> RunTile:
        """The line of a launch with ``groups`` programs for every tile of a head."""
        programs = functools.partial(self.programs, groups)
        return run_tile(table, card_of(self.device), self.taps, programs)

    def launch(
        self, kernel: Any, config: RunTile, joint: Kind, groups: int, **flags: bool
    ) -> Launch:
        """A kernel whose programs have some tokens of one head, ``groups`` programs of each."""
        tiles = self.tiles(config)
        return Launch(
            kernel,
            (self.batch * tiles * self.heads, groups),
            self.device,
            (self.tokens, self.heads, tiles, *joint[1][:2]),
            dict(num_warps=config.num_warps),
            GROUPS=self.groups,
            LEARNED=self.gates == 3,
            HAS_TAPS=self.taps > 0,
            **flags,
            REACH=self.reach,
            KEY_NORM=self.key_norm or "",
            EPS=NORM_EPS,
            D=self.width,
            BLOCK_D=self.block_d,
            ROWS=config.rows(self.block_d),
            RUN=config.run,
        )


class Plan(NamedTuple):
    """One forward pass; no launch where there are no rows."""

    launch: Launch | None
    rows: Allocate
    gate: Allocate
    written: Allocate
    last: Allocate


class BackwardPlan(NamedTuple):
    """One backward pass, and what adds the shares of the taps' gradient; without taps the first one
    is all.
    """

    launch: Launch | None
    add_shares: Launch | None
    djoint: Allocate
    dhistory: Allocate
    dtaps: Allocate | None
    dlogits: Allocate | None
    parts: Allocate | None


def launch_memory_input(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    logits: Tensor | None,
    present: Tensor | None,
    heads: int,
    key_norm: str | None,
    largest: float,
    theta: float | None,
) -> tuple[Tensor | None, ...]:
    """``(q, k, v, alpha, eta, theta, written, history of the next call)``; without logits q and the
    last.
    """
    if not is_current(joint.device):
        with torch.cuda.device(joint.device):
            return launch_memory_input(
                joint, history, taps, logits, present, heads, key_norm, largest, theta
            )
    joint = with_contiguous_rows(joint)
    operands = joint, *(contiguous(x) for x in (history, taps, logits, present))
    problem = problem_of(joint, taps, logits, heads, key_norm)
    plan = forward_plan(problem, kinds(*operands))
    q, last = plan.rows(), plan.last()
    others: tuple[Tensor | None, ...] = (None,) * 6
    if logits is not None:
        gates = (plan.gate() for _ in range(3))
        others = plan.rows(), plan.rows(), *gates, plan.written()
    if plan.launch is not None:
        plan.launch((*operands, q, *others, last), (largest if theta is None else theta,))
    return q, *others, last


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: Problem, operands: tuple[Kind | None, ...]) -> Plan:
    """The plan for operands of these kinds: joint, history, taps, logits and present."""
    joint, history, *_, present = operands
    assert joint is not None
    assert history is not None
    by_head = problem.batch, problem.tokens, problem.heads
    device = problem.device
    launch = None
    if problem.batch:
        # Queries are one program's, what is written another's.
        groups = 2 if problem.gates else 1
        config = problem.config(FORWARD, groups)
        flags = dict(HAS_PRESENT=present is not None)
        launch = problem.launch(_memory_input_kernel, config, joint, groups, **flags)
    return Plan(
        launch,
        memory((*by_head, problem.width), problem.dtype, device),
        memory(by_head, torch.float32, device),
        memory(by_head, torch.bool, device),
        memory((problem.batch, problem.reach, problem.channels), history[0], device),
    )


def launch_memory_input_backward(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    logits: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dalpha: Tensor | None,
    deta: Tensor | None,
    dtheta: Tensor | None,
    dlast: Tensor | None,
    heads: int,
    key_norm: str | None,
    largest: float,
    theta: float | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of (joint, history, taps, logits), of the last only where those of the gates are
    there: all or none of them.
    """
    if not is_current(joint.device):
        with torch.cuda.device(joint.device):
            return launch_memory_input_backward(
                *(joint, history, taps, logits, dq, dk, dv, dalpha, deta, dtheta, dlast),
                *(heads, key_norm, largest, theta),
            )
    joint = with_contiguous_rows(joint)
    others = history, taps, logits, dq, dk, dv, dalpha, deta, dtheta, dlast
    operands = joint, *(contiguous(x) for x in others)
    problem = problem_of(joint, taps, logits, heads, key_norm)
    plan = backward_plan(problem, kinds(*operands))
    djoint, dhistory = plan.djoint(), plan.dhistory()
    dtaps, dlogits, parts = (made(x) for x in (plan.dtaps, plan.dlogits, plan.parts))
    if plan.launch is None:
        if dtaps is not None:
            dtaps.zero_()
        return djoint, dhistory, dtaps, dlogits
    rate = largest if theta is None else theta
    plan.launch((*operands, djoint, dhistory, parts, dlogits), (rate,))
    if plan.add_shares is not None:
        plan.add_shares((parts, dtaps, None))
    return djoint, dhistory, dtaps, dlogits


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: Problem, operands: tuple[Kind | None, ...]) -> BackwardPlan:
    """The plan for operands of these kinds: joint, history, taps, logits, the gradients of q, k, v,
    alpha, eta, theta and the next history.
    """
    joint, history, taps, _, dq, dk, dv, dalpha, *_, dlast = operands
    assert joint is not None
    assert history is not None
    batch, tokens, channels, device = (
        *(problem.batch, problem.tokens, problem.channels),
        problem.device,
    )
    reach = problem.reach
    groups = problem.groups + (dalpha is not None)
    config = problem.config(BACKWARD, groups)
    shares = batch * problem.tiles(config)
    wide = functools.partial(memory, dtype=torch.float32, device=device)
    launch = add_shares = None
    if batch:
        launch = problem.launch(
            _memory_input_backward_kernel,
            config,
            joint,
            groups,
            HAS_DQ=dq is not None,
            HAS_DK=dk is not None,
            HAS_DV=dv is not None,
            HAS_DGATES=dalpha is not None,
            HAS_DLAST=dlast is not None and reach > 0,
        )
    if batch and taps is not None:
        add_shares = shares_launch(shares, (reach + 1) * channels, 0, device)
    return BackwardPlan(
        launch,
        add_shares,
        memory((batch, tokens, channels), problem.dtype, device),
        memory((batch, reach, channels), history[0], device),
        None if taps is None else memory((channels, reach + 1), taps[0], device),
        None if dalpha is None else wide((batch, tokens, problem.gates * problem.heads)),
        None if taps is None else wide((shares, channels, reach + 1)),
    )


def shares_launch(shares: int, sums: int, rest: int, device: torch.device) -> Launch:
    """What adds ``shares`` shares of ``sums`` numbers of one tensor and ``rest`` of another."""
    return Launch(
        _add_shares_kernel,
        (triton.cdiv(sums + rest, ADD_SHARES.numbers),),
        device,
        (shares,),
        dict(num_warps=ADD_SHARES.num_warps),
        SUMS=sums,
        REST=rest,
        PARTS=ADD_SHARES.parts,
        NUMBERS=ADD_SHARES.numbers,
    )


def problem_of(
    joint: Tensor, taps: Tensor | None, logits: Tensor | None, heads: int, key_norm: str | None
) -> Problem:
    batch, tokens, channels = joint.shape
    gates = 0 if logits is None else logits.shape[-1] // heads
    width = channels // (heads * (3 if gates else 1))
    count = 0 if taps is None else taps.shape[1]
    sizes = batch, tokens, heads, width, count, key_norm, gates
    return Problem(*sizes, joint.dtype, joint.device)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x itself, or a copy where its last axis is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
