"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from fusewright import gsa
from fusewright_testkit.conformance import Operation, Package

SCALE = 0.3
Tensors = list[torch.Tensor]

PACKAGE = Package(
    "fusewright.gsa",
    names=(
        "Form GatedSparseAttention KeyCache Law Path Selection SelectionStats all_keys "
        "gated_indexer indexer_kl_loss indexer_topk sparse_attention sparse_attention_with_lse"
    ),
    registered=(
        "gated_indexer gated_indexer_backward indexer_kl_loss indexer_kl_loss_backward "
        "indexer_topk sparse_attention sparse_attention_backward"
    ),
    without_triton=(
        "q, k, w = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 2)\n"
        "found = indexer_topk(q, k, w, torch.zeros(2), k_base=2, k_min=1, k_max=3)\n"
        "x = torch.randn(1, 5, 2, 4)\n"
        "assert sparse_attention(x, x, x, *found[:2]).isfinite().all()\n"
    ),
)


def drawn(shape, keys, device, dtype=torch.int32):
    """Different keys for each of ``shape[:-1]`` queries."""
    return torch.rand(*shape[:-1], keys, device=device).argsort(-1)[..., : shape[-1]].to(dtype)


def named_several_times(leading, slots, keys, device):
    """Selections of which every third row names each key once, the others keys as they fall, some
    up to ``slots`` times; a few slots hold none.
    """
    once = drawn((*leading, min(slots, keys)), keys, device)
    once = torch.nn.functional.pad(once, (0, slots - once.shape[-1]), value=-1)
    indices = torch.randint(-1, keys + 1, (*leading, slots), device=device, dtype=torch.int32)
    rows = torch.arange(leading[-1], device=device)
    indices[..., rows % 7 == 4, :] = 3 % keys
    return torch.where((rows % 3 == 0)[:, None], once, indices)


@dataclass(frozen=True)
class GsaOp(Operation):
    """One public function of differentiable tensors; options beside it are the same everywhere."""

    function: str
    options: Mapping[str, Any] = field(default_factory=dict)

    # B, Tq, Tkv, H, D.
    small = (1, 2, 3, 2, 3)
    tiny = (1, 2, 2, 1, 2)
    several = (1, 4, 5, 2, 7)
    # No other axis has one of these lengths: dynamo would take it for the same.
    growing = ((1, 5, 4, 2, 3), (1, 7, 4, 2, 3), (1, 9, 4, 2, 3))
    empty = ((0, 3, 4, 2, 5), (1, 0, 4, 2, 5), (1, 3, 0, 2, 5))
    gpu = ((2, 130, 200, 4, 64), (1, 1000, 1000, 4, 64))
    # Operands of a matrix product.
    products = 2

    @property
    def name(self) -> str:
        return "-".join((self.function, *(f"{k}={v}" for k, v in self.options.items())))

    def autocast(self, tensors: Tensors) -> Tensors:
        return [*(x.bfloat16() for x in tensors[: self.products]), *tensors[self.products :]]


class IndexerOp(GsaOp):
    """gated_indexer of q [B, Tq, H, d], k [B, Tkv, d], w [B, Tq, H] and bias [H]."""

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        defaults = {"scale": SCALE, "causal": False} | self.options
        return gsa.gated_indexer(*tensors, **defaults | options)

    def draw(
        self,
        shape: tuple[int, ...] = (1, 6, 7, 2, 5),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Tensors:
        """Operands of a (B, Tq, Tkv, H, d) from normal distributions."""
        batches, queries, keys, heads, width = shape
        q = torch.randn(batches, queries, heads, width, device=device).to(dtype)
        k = torch.randn(batches, keys, width, device=device).to(dtype)
        w = torch.randn(batches, queries, heads, device=device).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return [q, k, w, torch.randn(heads, device=device).to(wide)]


@dataclass(frozen=True)
class SparseOp(GsaOp):
    """Attention of q [B, T, H, D] to keys and values [B, Tkv, Hkv, D], and a selection that follows
    from the sizes: half of the keys, two queries of five with fewer.
    """

    key_heads: int = 2

    products = 3
    saves_outputs = True
    exempt: ClassVar = {
        "test_refused_input_touches_no_memory": "the selection follows from the operands",
    }

    def public(self, q, k, v, indices=None, count=None, **options: Any) -> Any:
        if indices is None:
            indices, count = self.selection(q, k)
        options = {"scale": SCALE} | self.options | options
        return getattr(gsa, self.function)(q, k, v, indices, count, **options)

    def selection(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batches, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        number = torch.arange(batches * queries, device=q.device).view(batches, queries, 1)
        slot = torch.arange((keys + 1) // 2, device=q.device)
        indices = (3 * number + slot) % max(keys, 1)
        count = len(slot) - 2 * (number % 5 == 1) - 9 * (number % 5 == 3)
        return indices.int(), count.squeeze(-1).clamp(min=0).int()

    def draw(
        self,
        shape: tuple[int, ...] = (1, 6, 7, 4, 5),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Tensors:
        """q, k and v of a (B, T, Tkv, H, D) from normal distributions."""
        batches, queries, keys, heads, width = shape
        q = torch.randn(batches, queries, heads, width, device=device).to(dtype)
        wide = (batches, keys, min(self.key_heads, heads), width)
        return [q, *(torch.randn(wide, device=device).to(dtype) for _ in "kv")]


@dataclass(frozen=True)
class LossOp(IndexerOp):
    """indexer_kl_loss of the indexer's operands and a temperature, beside an attention that follows
    from the sizes.
    """

    # Whether all keys but one are selected, in turn; or all.
    selects: bool = False

    exempt: ClassVar = dict.fromkeys(
        (
            "test_refused_input_touches_no_memory",
            "test_meta_tensors_get_shapes_and_dtypes",
            "test_auto_names_the_reason_for_the_reference_once",
        ),
        "the attention follows from the operands",
    ) | {"test_jacobian_is_right": "of one number it is the gradient"}

    @property
    def name(self) -> str:
        return super().name + "-selected" * self.selects

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        *operands, temperature = tensors
        attention = options.pop("attention", None) or self.attention(*operands[:2])
        defaults = {"scale": SCALE, "index_scale": SCALE, "causal": False} | self.options
        if self.selects:
            q, k = operands[:2]
            slots = torch.arange(k.shape[1], device=q.device).expand(*q.shape[:2], -1)
            defaults["indices"] = slots.where(slots != 1, -1)
            defaults["count"] = torch.full(q.shape[:2], k.shape[1], device=q.device)
        call = gsa.indexer_kl_loss
        return call(*operands, *attention, temperature=temperature, **defaults | options)

    def attention(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and lse of four heads on two heads of keys: numbers that are the same in every dtype
        that the yardstick takes, and under every compiler.
        """
        batches, queries, keys = *q.shape[:2], k.shape[1]

        def wave(*shape):
            numbers = torch.arange(torch.Size(shape).numel(), device=q.device)
            return ((numbers * 5 % 13 - 6) / 2).to(q.dtype).view(shape)

        tensors = wave(batches, queries, 4, 8), wave(batches, keys, 2, 8)
        return *tensors, 4.0 + wave(batches, 4, queries) / 2

    def draw(self, shape=(1, 6, 7, 2, 5), dtype=torch.float32, device="cpu") -> Tensors:
        *tensors, bias = super().draw(shape, dtype, device)
        return [*tensors, bias, torch.tensor(3.0, device=device, dtype=bias.dtype)]


@dataclass(frozen=True)
class SparseLseOp(SparseOp):
    """The same with the log-sum-exp, on a path of its own."""

    exempt: ClassVar = SparseOp.exempt | {
        "test_reference_gradients_are_the_derivatives": "the lse of no keys is minus infinity"
    }


INDEXER, LOSS = IndexerOp("gated_indexer"), LossOp("indexer_kl_loss")
OPERATIONS = {op.name: op for op in (INDEXER, SparseOp("sparse_attention"), LOSS)}
FORMS = {
    op.name: op
    for op in (
        IndexerOp("gated_indexer", {"causal": True, "q_offset": 1}),
        IndexerOp("gated_indexer", {"causal": True, "q_offset": 1, "form": "relu"}),
        SparseLseOp("sparse_attention_with_lse", {"path": "tiles"}),
        SparseLseOp("sparse_attention_with_lse", {"path": "queries"}),
        LossOp("indexer_kl_loss", selects=True),
        LossOp("indexer_kl_loss", {"form": "relu"}, selects=True),
    )
}
