"""rotary and apply_rotary in plain torch: the specification, the yardstick of the tests and what a
CPU runs.

Computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the inputs' dtype; outputs are
contiguous.
"""

from __future__ import annotations

import torch

from .._core.precision import wide

Tensor = torch.Tensor


def rotary(
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    beside: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor:
    """Rows rotated by the angles of their tokens, interleaved with rows ``beside``, after a prefix;
    see the public function.
    """
    joint = rotated(rows, cos, sin)
    if beside is not None:
        joint = torch.stack([joint, rotated(beside, cos, sin)], 2).flatten(1, 2)
    if prefix is not None:
        joint = torch.cat([prefix.expand(len(rows), *prefix.shape[-4:]), joint], 1)
    return joint.contiguous()


def rotary_backward(
    djoint: Tensor, cos: Tensor, sin: Tensor, beside: bool, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(drows, dbeside, dprefix): rows are rotated back, and a shared prefix gets the sum of its
    gradients over the batch. The second is empty unless rows ``beside`` were interleaved.
    """
    tokens = cos.shape[-2] * (1 + beside)
    dprefix, drotated = djoint.split((djoint.shape[1] - tokens, tokens), 1)
    back = rotated(drotated, *(x.repeat_interleave(1 + beside, -2) for x in (cos, -sin)))
    dbeside = back[:, 1::2].contiguous() if beside else djoint.new_empty(0)
    dprefix = wide(dprefix).sum(0).to(djoint.dtype) if shared else dprefix.clone()
    return back[:, :: 1 + beside].contiguous(), dbeside, dprefix.contiguous()


def rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of columns (i, i + D / 2) of the first row of K rotated by the angle of the token;
    the second as it is.
    """
    first, *others = rows.split(1, 2)
    x, y = wide(first).chunk(2, -1)
    cos, sin = (angles[..., None, None, :] for angles in (cos, sin))
    first = torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(rows.dtype)
    return torch.cat([first, *others], 2) if others else first


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, back: bool = False
) -> Tensor:
    """The first columns of each head rotated by the angles of its token, or back by them; see the
    public function.
    """
    cos, sin = (angles.unsqueeze(-2) for angles in (cos, -sin if back else sin))
    width = 2 * cos.shape[-1]
    rotates = wide(x[..., :width])
    if interleaved:
        a, b = rotates[..., ::2], rotates[..., 1::2]
        rows = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = rotates.chunk(2, -1)
        rows = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([rows.to(x.dtype), x[..., width:]], -1)
