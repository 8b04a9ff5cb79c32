"""Small random models of transformers, and the yardstick of what they compute."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from fusewright_testkit import Yardstick
from fusewright_testkit.yardstick import MOVES, Allowance, MovedResults
from torch import Tensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip(
    "transformers", reason="the extra transformers, of nox -s transformers, is not installed"
)
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
ATEN = torch.ops.aten
VOCABULARY, ROWS, LENGTH = 60, 2, 9
SIZES = dict(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    pad_token_id=None,
)


def made(family: str = "Llama", dtype: torch.dtype = F32, **options):
    """A random one, in eval mode; gains of norms are not one."""
    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    window = {"sliding_window": 4} if family == "Mistral" else {}
    config = getattr(transformers, config)(**SIZES | window | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    # Not the buffers: transformers keeps angles in fp32.
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model.eval()


class Unrounded(TorchDispatchMode):
    """What is in fp64 stays so where transformers asks for fp32, but for angles, which have no
    gradient.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        wide = func is ATEN._to_copy.default and args[0].dtype == F64
        if wide and torch.is_grad_enabled():
            kwargs = {**(kwargs or {}), "dtype": F64}
        return func(*args, **(kwargs or {}))


def function_of(model, **inputs):
    """Of the model's parameters: the loss, or where there are no labels the logits."""
    names = [name for name, _ in model.named_parameters()]

    def function(*parameters: Tensor) -> Tensor:
        exact = Unrounded() if parameters[0].dtype == F64 else nullcontext()
        with exact:
            found = functional_call(model, dict(zip(names, parameters, strict=True)), (), inputs)
        return found.logits if found.loss is None else found.loss

    return function


def yardstick_of(model, **inputs) -> Yardstick:
    """Of loss or logits, and all gradients of the model's parameters.

    Of one number, or of few, torch's error is one draw of roundings: the allowance is also that of
    others, as in the comparison of steps.
    """
    reference = function_of(model, **inputs)
    yardstick = Yardstick(reference, list(model.parameters()))
    runs = [yardstick.run(reference)]
    for _ in range(MOVES):
        with MovedResults(model.dtype):
            runs.append(yardstick.run(reference, F64))
    yardstick.allowed = list(map(Allowance.of, yardstick.truth, *runs))
    return yardstick
