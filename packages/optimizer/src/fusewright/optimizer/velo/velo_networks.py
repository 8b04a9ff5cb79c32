"""VeLO's networks: the LSTM of each tensor, the banks of weights that it mixes, and the public
files of their weights.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._core.checks import checked_count
from .._core.typed import called_as
from ..common.statistics.reference import Weights
from ..common.weights_file import check_names, check_shapes, cut_normal_, read_weights
from .reference import SHAPES, TENSOR_FEATURES

Tensor = torch.Tensor
# The factor of the mean over banks, whose weights begin as small as any network's.
MIXED = 100.0
# The public files' names, and ours. The first file also has a layer whose result the original
# throws away, the second one the weights that were mixed last.
LSTM_NAMES = {
    "mix_layer2.weight": "pooled.weight",
    "mix_layer2.bias": "pooled.bias",
    "final_mix_layer.weight": "own.weight",
    "final_mix_layer.bias": "own.bias",
    "rnn_to_controls.weight": "controls.weight",
    "rnn_to_controls.bias": "controls.bias",
    "step_size.weight": "multiplier.weight",
    "step_size.bias": "multiplier.bias",
}
BANK_NAMES = {
    "input_weights_": "w1",
    "input_bias_": "b1",
    "hidden_weights_.0": "w2",
    "hidden_bias_.0": "b2",
    "output_weights_": "w3",
    "output_bias_": "b3",
}
GATES, START = (
    ("lstm.linear.weight", "lstm.linear.bias"),
    ("lstm_init_state.0", "lstm_init_state.1"),
)
UNUSED = (
    *("mix_layer1.weight", "mix_layer1.bias", "input_weights", "input_bias", "hidden_weights.0"),
    *("hidden_bias.0", "output_weights", "output_bias"),
)


class VeLONetworks(nn.Module):
    """The networks of ``fusewright.optimizer.VeLO``.

        u = E f + max over tensors of relu(P f)     h', c' = LSTM(u, h, c)
        controls = C h'                             multiplier = S h'

    Args:
        hidden: width of the LSTM.
        banks: how many perceptrons there are to mix.
        exp_mult, step_mult: update = direction exp(exp_mult magnitude) step_mult.

    Attributes:
        pooled, own: ``nn.Linear`` of a tensor's 30 features: P, whose maximum over all tensors is
            added for each tensor, and E.
        lstm: ``nn.LSTMCell``.
        controls, multiplier: ``nn.Linear`` of the LSTM's output.
        start: ``[2, hidden]``: output and cell of a tensor before its first step.
        w1, b1, w2, b2, w3, b3: ``[banks, 4, 30]``, ``[banks, 4]``, ``[banks, 4, 4]``,
            ``[banks, 4]``, ``[banks, 3, 4]`` and ``[banks, 3]``; of the three outputs the last is
            not used.

    Weights start normal, cut at two deviations of 1 / sqrt(inputs), the rest at zero but for the
    forget gates' biases of 1. Metz et al., VeLO, arXiv 2211.09760.

    Raises:
        TypeError: hidden or banks is no whole number.
        ValueError: hidden or banks is below 1.
    """

    w1: nn.Parameter
    w2: nn.Parameter
    w3: nn.Parameter

    def __init__(
        self,
        hidden: int = 512,
        banks: int = 256,
        *,
        exp_mult: float = 0.001,
        step_mult: float = 0.001,
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        self.hidden: int = checked_count("hidden", hidden)
        self.banks: int = checked_count("banks", banks)
        self.exp_mult: float = float(exp_mult)
        self.step_mult: float = float(step_mult)
        self.pooled: nn.Linear = nn.Linear(TENSOR_FEATURES, hidden)
        self.own: nn.Linear = nn.Linear(TENSOR_FEATURES, hidden)
        self.lstm: nn.LSTMCell = nn.LSTMCell(hidden, hidden)
        self.controls: nn.Linear = nn.Linear(hidden, banks)
        self.multiplier: nn.Linear = nn.Linear(hidden, 1)
        self.start: nn.Parameter = nn.Parameter(torch.zeros(2, hidden))
        for name, shape in zip(BANK_NAMES.values(), SHAPES, strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros(banks, *shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        for x in self.parameters():
            nn.init.zeros_(x)
        for layer in (self.pooled, self.own, self.controls, self.multiplier):
            cut_normal_(layer.weight, layer.in_features)
        for gates in (self.lstm.weight_ih, self.lstm.weight_hh):
            # Their inputs are added, as of one layer.
            cut_normal_(gates, 2 * self.hidden)
        forget = slice(self.hidden, 2 * self.hidden)
        nn.init.ones_(self.lstm.bias_ih.data[forget])
        for weights in (self.w1, self.w2, self.w3):
            cut_normal_(weights, weights.shape[-1])

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        return (
            f"hidden={self.hidden}, banks={self.banks}, exp_mult={self.exp_mult}, "
            f"step_mult={self.step_mult}"
        )

    def bank(self) -> Weights:
        """The perceptrons' weights and biases, in the order of the layers."""
        return Weights(*(self.get_parameter(name) for name in BANK_NAMES.values()))

    def forward(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the LSTM for all tensors together.

        Args:
            features: ``[tensors, 30]``.
            state: ``[tensors, 2, hidden]``: output and cell of each.

        Returns:
            The perceptrons ``[tensors, 159]``, of which ``split`` has the parts, multipliers
            ``[tensors]``, and the state after this step.
        """
        most = self.pooled(features).relu().amax(0, keepdim=True)
        output, cell = self.lstm(self.own(features) + most, state.unbind(1))
        controls = self.controls(output) * (MIXED / self.banks)
        mixed = controls @ torch.cat([x.flatten(1) for x in self.bank()], 1)
        return mixed, self.multiplier(output)[:, 0], torch.stack((output, cell), 1)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


def load_velo(rnn_path: str | os.PathLike[str], mlp_path: str | os.PathLike[str]) -> VeLONetworks:
    """The public weights from local files: model.safetensors of the Hugging Face models
    Pauljanson002/VeLO_RNN and Pauljanson002/VeLO_MLP.

    Args:
        rnn_path, mlp_path: of the files; nothing is downloaded.

    Returns:
        Networks without gradients.

    Raises:
        ImportError: the package safetensors is not installed.
        ValueError: a file is no safetensors file, or has other names or shapes than the public
            ones.
    """
    rnn, mlp = (read_weights(path, "load_velo") for path in (rnn_path, mlp_path))
    check_names("the file of rnn_path", rnn, (*LSTM_NAMES, *GATES, *START), UNUSED)
    check_names("the file of mlp_path", mlp, BANK_NAMES, UNUSED)
    networks = VeLONetworks(rnn["step_size.weight"].shape[-1], len(mlp["input_bias_"]))
    hidden = networks.hidden
    names = LSTM_NAMES | BANK_NAMES
    shapes = {name: tuple(networks.get_parameter(mine).shape) for name, mine in names.items()}
    shapes |= dict(zip(GATES, ((4 * hidden, 2 * hidden), (4 * hidden,)), strict=True))
    shapes |= dict.fromkeys(START, (1, hidden))
    found = rnn | mlp
    check_shapes(found, shapes)
    state = {mine: found[name] for name, mine in names.items()}
    weight, bias = (in_torch_order(found[name]) for name in GATES)
    bias[hidden : 2 * hidden] += 1.0
    state["lstm.weight_ih"], state["lstm.weight_hh"] = weight.chunk(2, 1)
    state["lstm.bias_ih"], state["lstm.bias_hh"] = bias, torch.zeros_like(bias)
    state["start"] = torch.cat([found[name] for name in START])
    networks.load_state_dict(state)
    return networks.requires_grad_(False)


def in_torch_order(gates: Tensor) -> Tensor:
    """Input, cell, forget and output gates, as Haiku has them, with forget and cell exchanged."""
    i, g, f, o = gates.chunk(4)
    return torch.cat((i, f, g, o))
