from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fusewright_models import TransformerNP
from fusewright_models.bench.harness import Harness
from fusewright_models.cli import text as cli_text
from fusewright_models.models.titan_mac import TITAN_MAC, VARIANTS, TitanMAC
from fusewright_testkit import fresh
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typer import testing

from .commands import leave_out_pictures, written_text
from .trainers import SMALL, SMALL_TITAN_MAC

# Processes of these tests begin with the program of every model, and with what it imports: that
# takes longer than to train a tiny one.
fresh.PRELOADED += [f"fusewright_models.cli.{x}" for x in ("transformer_np", "titan_mac", "hybrid")]
fresh.PRELOADED += ["torch.distributed.fsdp", "matplotlib.figure", "typer.testing"]
# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

KINDS = {
    "mac": {},
    "mag": {"variant": "mag"},
    "mal": {"variant": "mal"},
    "lmm": {"variant": "lmm"},
    "mac-normalized": {"gate": "normalized"},
    "mag-normalized": {"variant": "mag", "gate": "normalized"},
    "mac-paper": {"memory_rule": "paper"},
    "lmm-paper": {"variant": "lmm", "memory_rule": "paper"},
    "mac-origin": {"memory_rule": "origin"},
    "mag-origin": {"variant": "mag", "memory_rule": "origin"},
    "mac-deep": {"memory_layers": 3},
    "lmm-deep": {"variant": "lmm", "memory_layers": 3},
    "mac-off": {"memory": False},
    "mag-off": {"variant": "mag", "memory": False},
    "mal-off": {"variant": "mal", "memory": False},
    "lmm-off": {"variant": "lmm", "memory": False},
    "mac-bare": {"persistent": 0, "convolution": 0},
    "mag-bare": {"variant": "mag", "persistent": 0, "convolution": 0},
}


@pytest.fixture(autouse=True, scope="session")
def programs_built_once() -> Iterator[None]:
    """Typer builds all commands of a program again at each call of a test, which takes longer than
    to refuse a flag.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """What a shell starts in the background ignores SIGINT, which tests send."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class HostReads(TorchDispatchMode):
    """Counts what would wait for a device: scalars read and shapes that depend on values."""

    WAITING = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
    )
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.WAITING
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Of tokens: that of the session, and not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A network by hand, in the public format: its direction is the fast momentum over the root of
    the second moment, its step one hundredth of that.
    """
    from safetensors.torch import save_file

    sizes = {"input": (32, 39), "linear_0": (32, 32), "output": (2, 32)}
    tensors = {f"network.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    tensors |= {f"network.{name}.bias": torch.zeros(size[0]) for name, size in sizes.items()}
    for row, sign in enumerate((1.0, -1.0)):
        tensors["network.input.weight"][row, 6] = sign
        tensors["network.linear_0.weight"][row, row] = 1.0
        tensors["network.output.weight"][0, row] = sign
    file = tmp_path_factory.mktemp("network") / "model.safetensors"
    save_file(tensors, file)
    return file


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only data of most runs of language models."""
    return written_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def short_samples() -> Iterator[None]:
    """A language model's run ends with a few tokens of its own, of the session's all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_text, "SAMPLE_TOKENS", 8)
        yield


@pytest.fixture
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a collection of garbage takes longer than what a benchmark measures here."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(Harness, "let_go", lambda harness: None)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)


@pytest.fixture
def host_reads() -> HostReads:
    """To be entered around what should wait for no device."""
    return HostReads()


@pytest.fixture
def small() -> Callable[..., TransformerNP]:
    """A model of three layers, fields of its config changed by name."""

    def make(*, backend: str = "reference", dtype: torch.dtype = torch.float32, **changes):
        return TransformerNP(replace(SMALL, **changes), backend=backend).to(dtype)

    return make


@pytest.fixture
def rows() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """x_context, y_context, x_target, y_target, drawn from a normal distribution."""

    def make(
        batch: int,
        context: int,
        targets: int,
        *,
        dtype=torch.float32,
        x_width=SMALL.x_width,
        y_width=1,
    ):
        shapes = (
            (batch, context, x_width),
            (batch, context, y_width),
            (batch, targets, x_width),
            (batch, targets, y_width),
        )
        return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)

    return make


@pytest.fixture
def assert_same_but_for_rounding() -> Callable[..., None]:
    """Two orders of the same fp64 sums: apart by no more than one rounding per term.

    The longest path through the small model sums fewer than 2^10 products, forward and backward
    together, and so do the oracles of the data; where these solve equations, a rounding grows by up
    to the condition number of the matrix. Errors are relative to the largest value of the sequence
    (all gradients of one loss), since single ones cancel: the query's gradient under one key is
    exactly zero.
    """

    def check(values: Sequence[Tensor], expected: Sequence[Tensor], condition: float = 1.0) -> None:
        largest = max(float(e.detach().abs().max()) for e in expected)
        bound = 2**10 * torch.finfo(torch.float64).eps * condition * largest
        for value, e in zip(values, expected, strict=True):
            assert value.shape == e.shape
            assert value.dtype == e.dtype == torch.float64
            assert (value - e).abs().max() <= bound

    return check


def make_titan_mac(
    kind: str, *, dtype: torch.dtype = torch.float32, backend: str = "reference", **changes
) -> TitanMAC:
    torch.manual_seed(1)
    config = replace(SMALL_TITAN_MAC, **(KINDS[kind] | changes))
    return TitanMAC(config, backend=backend).to(dtype)


def drawn_tokens(batch: int, length: int = 22) -> Tensor:
    return torch.randint(SMALL_TITAN_MAC.vocab_size, (batch, length))


class Sized(NamedTuple):
    """A TitanMAC of one size, and what its gates are asked at.

    Attributes:
        model: small or of the preset tiny on the CPU in fp32, that of another preset on the GPU
            under bf16 autocast.
        tokens: of three rows.
        changes: tokens that are changed one by one, the borders of chunks and segments among them.
    """

    model: TitanMAC
    tokens: Tensor
    changes: Iterable[int]

    @classmethod
    def of(cls, preset: str, kind: str) -> Sized:
        if preset == "small":
            model, tokens = make_titan_mac(kind), drawn_tokens(3)
            return cls(model, tokens, range(tokens.shape[1]))
        config = replace(TITAN_MAC[preset], **KINDS[kind])
        if preset == "tiny":
            tokens = torch.randint(config.vocab_size, (3, 70))
            return cls(TitanMAC(config), tokens, (0, 16, 63, 64))
        tokens = torch.randint(config.vocab_size, (3, 1100), device="cuda")
        return cls(TitanMAC(config).cuda(), tokens, (0, 63, 64, 511, 512, 700, 1099))

    def computing(self) -> torch.autocast:
        device = self.tokens.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        with self.computing():
            return self.model(tokens)[0]


@pytest.fixture
def titan_mac() -> Callable[..., TitanMAC]:
    """A small TitanMAC of a kind, fields of its config changed by name."""
    return make_titan_mac


@pytest.fixture
def draw_tokens() -> Callable[..., Tensor]:
    """Tokens for the small TitanMAC: two segments and a ragged third, of a chunk and a half, if
    nothing else is asked for.
    """
    return drawn_tokens


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of TitanMAC; a test of a few says so by its parametrization."""
    return request.param


# Presets whose training holds gigabytes.
LARGE = {"170m": (pytest.mark.large,)}


@pytest.fixture(
    params=[
        *(pytest.param(("small", kind), id=f"small-{kind}") for kind in KINDS),
        *(
            pytest.param(
                (preset, kind),
                id=f"{preset}-{kind}",
                marks=() if preset == "tiny" else (pytest.mark.gpu, *LARGE.get(preset, ())),
            )
            for preset in TITAN_MAC
            for kind in VARIANTS
        ),
    ]
)
def sized(request: pytest.FixtureRequest) -> Sized:
    """Gates hold at every size; those of the larger presets take a GPU."""
    return Sized.of(*request.param)
