"""VeLO's networks, and the public files that have them."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.velo.reference import split
from fusewright.optimizer.velo.velo_networks import VeLONetworks, load_velo

from .compared import assert_near

HIDDEN, BANKS = 5, 3
# Names and shapes of Pauljanson002/VeLO_RNN with 512 for H and 256 for K, and of VeLO_MLP.
RNN = {
    "mix_layer1.weight": ("H", 30),
    "mix_layer1.bias": ("H",),
    "mix_layer2.weight": ("H", 30),
    "mix_layer2.bias": ("H",),
    "final_mix_layer.weight": ("H", 30),
    "final_mix_layer.bias": ("H",),
    "lstm.linear.weight": ("4H", "2H"),
    "lstm.linear.bias": ("4H",),
    "rnn_to_controls.weight": ("K", "H"),
    "rnn_to_controls.bias": ("K",),
    "step_size.weight": (1, "H"),
    "step_size.bias": (1,),
    "lstm_init_state.0": (1, "H"),
    "lstm_init_state.1": (1, "H"),
}
BANK = {
    "input_weights_": ("K", 4, 30),
    "input_bias_": ("K", 4),
    "hidden_weights_.0": ("K", 4, 4),
    "hidden_bias_.0": ("K", 4),
    "output_weights_": ("K", 3, 4),
    "output_bias_": ("K", 3),
}
# What was mixed last is in the file too.
MLP = BANK | {name.replace("_.", ".").rstrip("_"): shape[1:] for name, shape in BANK.items()}
LETTERS = {"H": HIDDEN, "2H": 2 * HIDDEN, "4H": 4 * HIDDEN, "K": BANKS}


def drawn(shapes: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    sizes = {name: [LETTERS.get(x, x) for x in shape] for name, shape in shapes.items()}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


@pytest.fixture
def files(tmp_path):
    """Saves weights in the public format, with changes; returns the paths."""
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="the package safetensors is not installed"
    )

    def save(**changes):
        paths = []
        for place, shapes in enumerate((RNN, MLP)):
            found = drawn(shapes)
            found |= {name: x for name, x in changes.items() if name in found or "new" in name}
            paths.append(tmp_path / f"{place}.safetensors")
            kept = {name: x for name, x in found.items() if x is not None}
            safetensors.save_file(kept, str(paths[-1]))
        return paths

    return save


def published(features: torch.Tensor, state: torch.Tensor, rnn: dict, mlp: dict):
    """HyperV2's forward pass with these weights, one tensor after the other."""

    def linear(name, x):
        return x @ rnn[f"{name}.weight"].T + rnn[f"{name}.bias"]

    most = torch.stack([linear("mix_layer2", f).relu() for f in features]).amax(0)
    found = []
    for f, (h, c) in zip(features, state, strict=True):
        u = linear("final_mix_layer", f) + most
        i, g, forget, o = linear("lstm.linear", torch.cat((u, h))).split(HIDDEN)
        c = torch.sigmoid(forget + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        controls = linear("rnn_to_controls", h)
        bank = [100 * sum(k * x for k, x in zip(controls, mlp[name], strict=True)) for name in BANK]
        weights = torch.cat([(x / BANKS).flatten() for x in bank])
        found.append((weights, linear("step_size", h)[0], torch.stack((h, c))))
    return [torch.stack(some) for some in zip(*found, strict=True)]


def test_public_files_are_the_published_networks(files):
    networks = load_velo(*files())
    assert (networks.hidden, networks.banks) == (HIDDEN, BANKS)
    assert (networks.exp_mult, networks.step_mult) == (0.001, 0.001)
    assert not any(x.requires_grad for x in networks.parameters())
    rnn, mlp = ({k: x.double() for k, x in drawn(some).items()} for some in (RNN, MLP))
    assert torch.equal(networks.start.double()[:1], rnn["lstm_init_state.0"])
    assert torch.equal(networks.start.double()[1:], rnn["lstm_init_state.1"])
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    state = torch.randn(4, 2, HIDDEN, generator=generator, dtype=torch.float64)
    found = networks.double()(features, state)
    for x, y in zip(found, published(features, state, rnn, mlp), strict=True):
        # The forget gates' 1 was added in fp32.
        assert_near([x.float()], [y.float()])


def test_parts_of_a_mixed_perceptron_lie_in_the_order_of_its_layers():
    parts = split(torch.arange(159))
    assert [list(x.shape) for x in parts] == [[4, 30], [4], [4, 4], [4], [3, 4], [3]]
    assert torch.equal(torch.cat([x.flatten() for x in parts]), torch.arange(159))


def test_networks_reach_all_their_weights(learned):
    networks = learned.velo_networks()
    features = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    found = networks(features, networks.start.expand(3, -1, -1))
    sum(x.square().sum() for x in found).backward()
    assert [name for name, x in networks.named_parameters() if not x.grad.any()] == []


def test_drawn_networks_have_the_published_sizes():
    networks = VeLONetworks()
    sizes = {name: list(x.shape) for name, x in networks.named_parameters()}
    assert sizes["lstm.weight_ih"] == sizes["lstm.weight_hh"] == [2048, 512]
    assert sizes["w1"] == [256, 4, 30]
    assert sizes["controls.weight"] == [256, 512]
    deviation = networks.w1.std().item()
    # Of a normal distribution that is cut at two deviations.
    assert deviation == pytest.approx(0.88 * 30**-0.5, rel=0.02)
    assert networks.lstm.bias_ih.sum() == 512


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        VeLONetworks(0)
    with pytest.raises(TypeError, match="banks must be a whole number, got float"):
        VeLONetworks(8, 2.5)


def test_files_of_other_networks_are_refused(files):
    with pytest.raises(ValueError, match=r"step_size.bias must have shape \[1\], got \[2\]"):
        load_velo(*files(**{"step_size.bias": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"hidden_bias_.0 must have shape \[3, 4\]"):
        load_velo(*files(**{"hidden_bias_.0": torch.ones(3, 5)}))
    with pytest.raises(ValueError, match="the file of rnn_path must have the weights"):
        load_velo(*files(**{"step_size.bias": None}))
    with pytest.raises(ValueError, match="the file of mlp_path must have the weights"):
        load_velo(*files(**{"output_bias_": None}))
    rnn, mlp = files()
    with pytest.raises(ValueError, match="the file of rnn_path"):
        load_velo(mlp, rnn)


def test_file_that_is_no_safetensors_is_refused(files, tmp_path):
    rnn, _ = files()
    (tmp_path / "weights").write_text("weights")
    with pytest.raises(ValueError, match="load_velo wants a file in the format safetensors"):
        load_velo(rnn, tmp_path / "weights")


def test_weights_that_the_original_does_not_use_may_be_absent(files):
    unused = {name: None for name in (*RNN, *MLP) if "mix_layer1" in name}
    unused |= {name: None for name in MLP if name not in BANK}
    x, y = load_velo(*files()).state_dict(), load_velo(*files(**unused)).state_dict()
    assert all(torch.equal(x[name], y[name]) for name in x)


def test_missing_safetensors_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        load_velo(tmp_path / "a", tmp_path / "b")
