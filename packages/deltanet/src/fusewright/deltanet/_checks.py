"""What the public functions ask of their arguments, before any memory is touched."""

from __future__ import annotations

import math
import numbers

import torch

from ._backends import BACKENDS

Tensor = torch.Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (torch.int32, torch.int64)
RESIDUALS = ("none", "qk", "v")


def check_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """q, k [B, T, H, K], v [B, T, HV, V], gates [B, T, HV], state [N, HV, K, V], cu_seqlens
    [N + 1] over the tokens of one row.
    """
    check_rows(q, k, v, "B, T, ")
    for name, x in gates.items():
        check_gate(name, x, v, "B, T, HV")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        check_lengths(cu_seqlens, q)
        sequences = cu_seqlens.numel() - 1
    if state is not None:
        check_state("initial_state", state, q, v, sequences)


def check_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """The same without the axis of tokens."""
    check_rows(q, k, v, "B, ")
    for name, x in (("g", g), ("beta", beta)):
        check_gate(name, x, v, "B, HV")
    check_state("state", state, q, v, q.shape[0])


def given_decay(g: Tensor | None, alpha: Tensor | None) -> dict[str, Tensor]:
    """The one of g and alpha that is given, under its name."""
    if g is not None and alpha is not None:
        raise ValueError("one of g and alpha must be given, got both")
    if alpha is not None:
        return {"alpha": alpha}
    if g is None:
        raise ValueError("one of g and alpha must be given, got neither")
    return {"g": g}


def check_rows(q: Tensor, k: Tensor, v: Tensor, lead: str) -> None:
    axes = lead.count(",") + 2
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.ndim != axes or not x.shape[-1]:
            heads = "HV, V" if name == "v" else "H, K"
            raise ValueError(
                f"{name} must be [{lead}{heads}] with a width of at least 1, got {tuple(x.shape)}"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        check_device(name, x, q)
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}")
    shared = q.shape[-2]
    if v.shape[:-2] != q.shape[:-2] or not shared or v.shape[-2] % shared:
        raise ValueError(
            f"v must be [{lead}HV, V] beside q {tuple(q.shape)}, HV a multiple of its heads, "
            f"got {tuple(v.shape)}"
        )


def check_gate(name: str, x: Tensor, v: Tensor, axes: str) -> None:
    check_floating(name, x)
    if x.shape != v.shape[:-1]:
        raise ValueError(f"{name} must be [{axes}] = {tuple(v.shape[:-1])}, got {tuple(x.shape)}")
    check_device(name, x, v)


def check_state(name: str, state: Tensor, q: Tensor, v: Tensor, sequences: int) -> None:
    check_floating(name, state)
    shape = (sequences, v.shape[-2], q.shape[-1], v.shape[-1])
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must be [N, HV, K, V] = {shape}, got {tuple(state.shape)}")
    wanted = dtype_of_state(q)
    if state.dtype != wanted:
        raise ValueError(f"{name} must be {wanted} beside q of {q.dtype}, got {state.dtype}")
    check_device(name, state, q)


def check_lengths(cu_seqlens: Tensor, q: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in LENGTHS:
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] with N at least 1, got {cu_seqlens.shape}")
    if q.shape[0] != 1:
        raise ValueError(f"with cu_seqlens q must have one row, B = 1, got {tuple(q.shape)}")
    check_device("cu_seqlens", cu_seqlens, q)


def check_residual_name(d_residual: str) -> None:
    if d_residual not in RESIDUALS:
        raise ValueError(f"d_residual must be one of {', '.join(RESIDUALS)}, got {d_residual!r}")


def check_residual(d_residual: str, d_weight: Tensor | None, v: Tensor) -> None:
    check_residual_name(d_residual)
    if d_weight is None:
        return
    if d_residual == "none":
        raise ValueError('d_weight needs d_residual="qk" or "v", got "none"')
    check_floating("d_weight", d_weight)
    if d_weight.shape != v.shape[2:3]:
        raise ValueError(f"d_weight must be [HV] = {v.shape[2:3]}, got {tuple(d_weight.shape)}")
    check_device("d_weight", d_weight, v)


def check_layer(
    sizes: dict[str, int], expand_v: float, rope_theta: float | None, d_residual: str
) -> None:
    """Sizes of GatedDeltaNet, by the names of its arguments."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    width, heads, value_heads = (sizes[x] for x in ("head_dim", "num_heads", "num_v_heads"))
    columns = width * expand_v
    if not math.isclose(round(columns), columns, rel_tol=1e-5) or columns < 1:
        raise ValueError(
            f"expand_v * head_dim must be a whole number, at least 1, got {expand_v} * {width}"
        )
    if value_heads % heads:
        raise ValueError(f"num_v_heads must be a multiple of num_heads {heads}, got {value_heads}")
    if rope_theta is not None and width % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {width}")
    check_residual_name(d_residual)


def check_tokens(x: Tensor, mask: Tensor | None, hidden_size: int) -> None:
    """x [B, T, hidden_size], mask [B, T]."""
    check_floating("x", x)
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(f"x must be [B, T, {hidden_size}], got {tuple(x.shape)}")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"mask must be a bool tensor, got {found}")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be [B, T] = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    if mask.device != x.device:
        raise ValueError(f"mask must be on x's device {x.device}, got {mask.device}")


def check_backend_or_fla(backend: str) -> None:
    if backend not in (*BACKENDS, "fla"):
        raise ValueError(f'backend must be "auto", "fla", "triton" or "reference", got {backend!r}')


def checked_scale(scale: float | None, q: Tensor) -> float:
    """scale as a float; None means K ** -0.5."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, (float, numbers.Real)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def check_device(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on q's device {other.device}, got {tensor.device}")


def dtype_of_state(q: Tensor) -> torch.dtype:
    """What states, decays and rates beside q are in."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast hands them to a matrix product."""
    x = tensors[0]
    kind = x.device.type
    # Autocast knows no meta tensors.
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
