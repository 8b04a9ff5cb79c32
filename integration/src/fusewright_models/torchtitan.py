"""TitanMAC and HybridLM in torchtitan, whose program trains them (extra "torchtitan"):

    torchrun --nproc-per-node 2 -m torchtitan.train --module fusewright_models.torchtitan \\
        --config titan_mac_170m --training.steps 1000

The configs are those of ``CONFIGS``: a model and a preset of ``fusewright-train``, with its sizes,
data and rate. ``register`` makes a ``ModelSpec`` of another shape, for configs of one's own. Models
are sharded by FSDP2, block by block, and replicated beside that with
``--parallelism.data-parallel-replicate-degree``; they train on all of their losses. Tensor,
context, pipeline and expert parallelism, torchtitan's activation checkpointing and its compilation
are refused: there are no plans for the models' layers yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torchtitan.trainer
from fusewright.optimizer import M3, AdamW, Muon
from torch import Tensor, distributed, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, cross_entropy_loss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.fsdp import (
    disable_fsdp_gradient_division,
    get_fsdp_reshard_after_forward_policy,
)
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from ._core.typed import called_as
from .cli.presets import HYBRID_PRESETS, TITAN_MAC_PRESETS, TextPreset
from .models.hybrid import HybridConfig, HybridLM
from .models.titan_mac import TitanMAC, TitanMACConfig
from .text import Windows, documents, make_tokenizer, read_corpus
from .training.processes import Processes, placed, running_averages

Shape = TitanMACConfig | HybridConfig
# The one that has no plans for the layers of a model.
BACKEND = "partial_dtensor"
# Where the model is in what torchtitan builds.
INNER = "model."
# What is scored elsewhere, and not trained on.
HELD_OUT_BYTES = 2**12
OPTIMIZERS = {"fusewright.AdamW": AdamW, "fusewright.M3": M3, "fusewright.Muon": Muon}


class LanguageModel(BaseModel):
    """A TitanMAC or a HybridLM as torchtitan builds it: without memory, then sharded, then drawn.

    Args:
        config: with the shape of the model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """
        Attributes:
            shape: of the model, whose type says which.
            backend: as the models have it.
            autocast: whether a forward pass is under autocast for bf16.
        """

        shape: Shape
        backend: str = "auto"
        autocast: bool = False

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """
            Raises:
                ValueError: what the models do not take is asked for.
            """
            parallelism = config.parallelism
            degrees = {
                name: getattr(parallelism, f"{name}_parallel_degree")
                for name in ("tensor", "context", "pipeline", "expert")
            }
            several = [name for name, degree in degrees.items() if degree > 1]
            if several:
                raise ValueError(
                    f"wanted data parallelism alone; got {several[0]}_parallel_degree "
                    f"{degrees[several[0]]}"
                )
            if parallelism.spmd_backend != BACKEND:
                raise ValueError(f"wanted spmd_backend {BACKEND}; got {parallelism.spmd_backend}")
            if config.activation_checkpoint is not None:
                raise ValueError(
                    "wanted activation_checkpoint:none, since the model recomputes by its own "
                    f"shape; got {type(config.activation_checkpoint).__qualname__}"
                )
            if config.compile.enable:
                raise ValueError("wanted the model as it is; got compile.enable")
            training = config.training
            self.autocast = "bfloat16" in (training.dtype, training.mixed_precision_param)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and operations of a token forward and backward: two for each weight of a
            product forward and four backward, without those between tokens.
            """
            weights = sum(p.numel() for p in model.parameters())
            products = sum(p.numel() for p in model.parameters() if p.ndim > 1)
            return weights, 6 * products

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model: Any = self.built()

    def built(self) -> nn.Module:
        """On the default device."""
        shape, backend = self.config.shape, self.config.backend
        kind = TitanMAC if isinstance(shape, TitanMACConfig) else HybridLM
        return kind(shape, backend=backend)  # type: ignore[arg-type]

    def blocks(self) -> list[nn.Module]:
        """What is sharded by itself; a reversible stack wants its parameters whole."""
        if isinstance(self.model, TitanMAC):
            return list(self.model.blocks)
        config: HybridConfig = self.model.config
        return list(self.model.stack.layers) if config.mode == "plain" else []

    def verify_module_protocol(self) -> None:
        """Layers are plain torch modules, which torchtitan does not build one by one."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """As the model draws its weights on the host, whole and the same in all processes, which
        have one seed; each takes its shards.
        """
        with torch.device("cpu"):
            drawn = self.built()
        for mine, theirs in (
            (dict(self.model.named_parameters()), dict(drawn.named_parameters())),
            (dict(self.model.named_buffers()), dict(drawn.named_buffers())),
        ):
            for name, x in mine.items():
                x.detach().copy_(placed(theirs[name].detach().to(x.dtype), x))

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The loss to train on, 0-d, where targets are given; else the logits ``[B, T, V]``.

        Args:
            tokens: ``[B, T]``.
            targets: ``[B, T]``, -100 where there is nothing to predict.
            positions: have no meaning here: the model counts by itself.
        """
        is_cast = self.config.autocast
        context = torch.autocast(tokens.device.type, torch.bfloat16) if is_cast else nullcontext()
        with context:
            if targets is None:
                found = self.model(tokens)
                return self.model.logits(found[0] if isinstance(found, tuple) else found)
            found = self.model(tokens, targets=targets)
            return found if isinstance(found, Tensor) else found.total

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


def shard(
    model: LanguageModel, *, parallel_dims: Any, training: Any, parallelism: Any, **_: Any
) -> LanguageModel:
    """The model with its blocks, and all else together, sharded over the mesh's axis "fsdp"."""
    names = ["dp_replicate"] * parallel_dims.dp_replicate_enabled + ["fsdp"]
    policy = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, False)
    # Autocast rounds for products what is gathered in fp32.
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(names),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    for block in model.blocks():
        fully_shard(block, reshard_after_forward=policy, **options)
    fully_shard(model, **options)
    # The loss is a part of the mean over all tokens, and gradients are summed.
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gloo has sums alone.
            module.set_force_sum_reduction_for_comms(True)
    return model


class Adapter(StateDictAdapter):
    """Names of weights as ``save_pretrained`` of the models has them."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(INNER): x for name, x in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {INNER + name: x for name, x in hf_state_dict.items()}


class Loss(BaseLoss):
    """Of a batch whose loss the model has computed, its part of the mean over all processes'
    tokens; of logits, as an evaluation has them, the cross entropy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.fn = summed

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.fn(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


def summed(pred: Tensor, labels: Tensor) -> Tensor:
    """Over this process's tokens."""
    if pred.ndim:
        return cross_entropy_loss(pred, labels)
    return pred * (labels != IGNORE_INDEX).sum()


class Optimizers(OptimizersContainer):
    """torchtitan's, and by the names of ``OPTIMIZERS`` those of fusewright.optimizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        if name in OPTIMIZERS:
            return OPTIMIZERS[name]
        return OptimizersContainer._resolve_optimizer_factory(name)

    @staticmethod
    def _build_param_groups(
        model: nn.Module, configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> Any:
        found, patterns = OptimizersContainer._build_param_groups(model, configs, impl_kwargs)
        for name in found.keys() & OPTIMIZERS.keys():
            for group in found[name]:
                # Which have no meaning there.
                for option in impl_kwargs:
                    group.pop(option, None)
        return found, patterns


class Tokenizer(BaseTokenizer):
    """Bytes, or a tokenizer of ``fusewright-train``."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        source: str | None = None
        """A tokenizers file or a name on the hub; bytes without one."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.tokenizer = make_tokenizer(config.source)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(x) for x in self.tokenizer.prompt(text.encode())]

    def decode(self, tokens: Any, **_: Any) -> str:
        return self.tokenizer.decode(np.asarray(tokens)).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return self.tokenizer.vocab_size


class Text(BaseDataLoader):
    """Random windows of a text's tokens as ``fusewright-train`` draws them: each process takes its
    rows of a batch of all.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        most_tokens: int = 2**26
        """Tokens that are read; of ``dataset_path``, or of Python's own standard library."""

        seed: int = 0
        """Of the windows that are drawn."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Tokenizer,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise TypeError(f"wanted the tokenizer of this module; got {type(tokenizer).__name__}")
        path = config.dataset_path
        corpus = read_corpus(
            documents(path),
            tokenizer.tokenizer,
            most_tokens=config.most_tokens,
            held_out_bytes=HELD_OUT_BYTES,
        )
        self.windows = Windows(
            corpus.training, length=seq_len, seed=config.seed, digest=corpus.digest
        )
        self.count, self.first = dp_world_size * local_batch_size, dp_rank * local_batch_size
        self.last = self.first + local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            windows = self.windows.sample(self.count).part(self.first, self.last).windows
            yield {"input": windows[:, :-1].contiguous()}, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return self.windows.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.windows.load_state_dict(state_dict)


class Trainer(torchtitan.trainer.Trainer):
    """torchtitan's, whose models are given the labels: their losses are more than cross entropy of
    the next token, and never have all logits in memory.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):
        tokenizer: BaseTokenizer.Config = field(default_factory=Tokenizer.Config)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        known, shape = self.tokenizer.get_vocab_size(), config.model_spec.model.shape
        if known > shape.vocab_size:
            raise ValueError(
                f"the tokenizer has {known} tokens; got a model of {shape.vocab_size}, too few"
            )
        # torchtitan asks for it after the first step, and torch 2.13 has it by another name.
        if not hasattr(distributed, "set_timeout"):
            distributed.set_timeout = distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]

    def post_dataloading_process(self, input_dict: dict[str, Tensor], labels: Tensor) -> Any:
        inputs, labels, others = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, others | {"targets": labels}

    def forward_backward_step(self, **batch: Any) -> Tensor:
        loss = super().forward_backward_step(**batch)
        if self.parallel_dims.dp_enabled:
            # All processes are those of the data: no other parallelism is taken.
            for model in self.model_parts:
                Processes("ddp").average_(*running_averages(model))
        return loss


def register(name: str, flavor: str, shape: Shape, *, backend: str = "auto") -> ModelSpec:
    """What torchtitan is to know of a model of this shape."""
    return ModelSpec(
        name=name,
        flavor=flavor,
        model=LanguageModel.Config(shape=shape, backend=backend),
        parallelize_fn=shard,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Adapter,
    )


def config_of(name: str, flavor: str, preset: TextPreset) -> Trainer.Config:
    """The training that ``fusewright-train`` has by default, of bytes, for torchtitan."""
    options = {"lr": preset.lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="fusewright.AdamW", optimizer_kwargs=options
    )
    shape = dataclasses.replace(preset.architecture, vocab_size=256)
    return Trainer.Config(
        model_spec=register(name, flavor, shape),
        hf_assets_path=".",
        loss=Loss.Config(),
        tokenizer=Tokenizer.Config(),
        dataloader=Text.Config(),
        optimizer=Optimizers.Config(param_groups=[group]),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=max(1, preset.steps // 20)),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=preset.batch_size,
            seq_len=preset.seq_len,
            steps=preset.steps,
            # Captured steps of the models are fusewright-train's.
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend=BACKEND),
        activation_checkpoint=None,
    )


# By the name that --config takes.
CONFIGS: Mapping[str, Any] = {
    f"{name}_{flavor}": partial(config_of, name, flavor, preset)
    for name, presets in (("titan_mac", TITAN_MAC_PRESETS), ("hybrid", HYBRID_PRESETS))
    for flavor, preset in presets.items()
}


def __getattr__(name: str) -> Any:
    if name in CONFIGS:
        return CONFIGS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *CONFIGS]
