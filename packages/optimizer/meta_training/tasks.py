"""Small problems on which the learned optimizer's network is trained and judged, drawn on the
device.

A task is a network's form and a kind of data; a problem of it is drawn: how its data are spread and
how noisy they are. ``n`` problems lie along the first axis of every tensor. Data never repeat, so
that a batch's loss is that of unseen data. Tables are read by products with one-hot rows, whose
gradients have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .parts import (
    Task,
    Tensors,
    cross_entropy,
    drawn_classes,
    layer_shapes,
    layers,
    mislabelled,
    normal,
    one_hot,
    patches,
    spread,
)

Tensor = torch.Tensor


@dataclass(frozen=True)
class Classification:
    """Clusters, two or more of a class, told apart by a perceptron."""

    sizes: tuple[int, ...]
    activation: str = "relu"
    clusters: int = 2
    batch_size: int = 64

    @property
    def name(self) -> str:
        return "classes " + "-".join(map(str, self.sizes))

    def shapes(self) -> list[tuple[int, ...]]:
        return layer_shapes(self.sizes)

    def problems(self, n: int, device: torch.device) -> Tensors:
        count = self.clusters * self.sizes[-1]
        centres = torch.randn(n, count, self.sizes[0], device=device)
        return centres * spread(n, 0.4, 2.0, device, 2), 0.2 * torch.rand(n, 1, device=device)

    def batch(self, problems: Tensors) -> Tensors:
        centres, noise = problems
        n, count, _ = centres.shape
        cluster = drawn_classes(n, self.batch_size, count, centres.device)
        x = one_hot(cluster, count) @ centres
        targets = mislabelled(cluster % self.sizes[-1], self.sizes[-1], noise)
        return x + torch.randn_like(x), targets

    def loss(self, params: Sequence[Tensor], batch: Tensors) -> Tensor:
        x, targets = batch
        return cross_entropy(layers(x, params, self.activation), targets)


@dataclass(frozen=True)
class Regression:
    """A perceptron, or with two sizes a plane, fitted to a random smooth function of inputs whose
    directions are of very different lengths.
    """

    sizes: tuple[int, ...]
    activation: str = "tanh"
    batch_size: int = 64

    @property
    def name(self) -> str:
        return "regression " + "-".join(map(str, self.sizes))

    def shapes(self) -> list[tuple[int, ...]]:
        return layer_shapes(self.sizes)

    def problems(self, n: int, device: torch.device) -> Tensors:
        inputs, outputs = self.sizes[0], self.sizes[-1]
        lengths = torch.linspace(0.0, -1.0, inputs, device=device)[:, None]
        mix = torch.randn(n, inputs, inputs, device=device) * inputs**-0.5
        mix = spread(n, 1.0, 30.0, device, 2) ** lengths * mix
        inner = torch.randn(n, inputs, 16, device=device) * inputs**-0.5
        outer = torch.randn(n, 16, outputs, device=device) * 0.25
        noise = spread(n, 0.003, 0.3, device, 2)
        return mix, inner, outer * spread(n, 0.3, 3.0, device, 2), noise

    def batch(self, problems: Tensors) -> Tensors:
        mix, inner, outer, noise = problems
        x = torch.randn(len(mix), self.batch_size, self.sizes[0], device=mix.device) @ mix
        y = x @ inner
        if len(self.sizes) > 2:
            y = torch.sin(2.0 * y)
        y = y @ outer
        return x, y + noise * torch.randn_like(y)

    def loss(self, params: Sequence[Tensor], batch: Tensors) -> Tensor:
        x, y = batch
        return (layers(x, params, self.activation) - y).square().mean()


@dataclass(frozen=True)
class Images:
    """Noisy, shifted patterns of a side of 8 told apart by two convolutions of 3 x 3, the second
    with strides of 2, and a layer over the means of its channels.
    """

    channels: tuple[int, int]
    classes: int = 10
    batch_size: int = 32

    SIDE = 8

    @property
    def name(self) -> str:
        return f"images {self.channels[0]}-{self.channels[1]}-{self.classes}"

    def shapes(self) -> list[tuple[int, ...]]:
        first, second = self.channels
        kernels = [(9, first), (first,), (9 * first, second), (second,)]
        return [*kernels, (second, self.classes), (self.classes,)]

    def problems(self, n: int, device: torch.device) -> Tensors:
        patterns = torch.randn(n, self.classes, self.SIDE, self.SIDE, device=device)
        for axis in (-1, -2):
            patterns = (patterns + patterns.roll(1, axis)) * 0.5**0.5
        shifts = [(row, column) for row in (0, 2, 4) for column in (0, 2, 4)]
        shifted = [patterns.roll(shift, (-2, -1)) for shift in shifts]
        bank = torch.stack(shifted, 2).flatten(1, 2).flatten(2)
        return bank, spread(n, 0.3, 1.5, device, 2), 0.1 * torch.rand(n, 1, device=device)

    def batch(self, problems: Tensors) -> Tensors:
        bank, noise, share = problems
        n, count, _ = bank.shape
        place = drawn_classes(n, self.batch_size, count, bank.device)
        x = one_hot(place, count) @ bank
        x = x + noise * torch.randn_like(x)
        targets = mislabelled(place // (count // self.classes), self.classes, share)
        return x.unflatten(-1, (1, self.SIDE, self.SIDE)), targets

    def loss(self, params: Sequence[Tensor], batch: Tensors) -> Tensor:
        x, targets = batch
        x = F.relu(patches(x, 1) @ params[0] + params[1])
        x = x.mT.unflatten(-1, (self.SIDE, self.SIDE))
        x = F.relu(patches(x, 2) @ params[2] + params[3]).mean(-2)
        return cross_entropy(x @ params[4] + params[5], targets)


@dataclass(frozen=True)
class Bags:
    """Bags of words told apart by the mean of their embeddings; most words are rare."""

    words: int
    width: int
    classes: int = 6
    batch_size: int = 64

    LENGTH = 8

    @property
    def name(self) -> str:
        return f"bags {self.words}-{self.width}-{self.classes}"

    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.words, self.width), *layer_shapes((self.width, self.classes))]

    def problems(self, n: int, device: torch.device) -> Tensors:
        rank = torch.arange(1, self.words + 1, device=device).log()
        topics = torch.randn(n, self.classes, self.words, device=device)
        chances = torch.softmax(topics * spread(n, 0.5, 2.0, device, 2) - rank, -1)
        return chances.cumsum(-1), 0.2 * torch.rand(n, 1, device=device)

    def batch(self, problems: Tensors) -> Tensors:
        reached, share = problems
        topic = drawn_classes(len(reached), self.batch_size, self.classes, reached.device)
        of_topic = one_hot(topic, self.classes) @ reached
        drawn = torch.rand(*topic.shape, self.LENGTH, device=reached.device)
        words = torch.searchsorted(of_topic, drawn).clamp(max=self.words - 1)
        counts = one_hot(words, self.words).mean(-2)
        return counts, mislabelled(topic, self.classes, share)

    def loss(self, params: Sequence[Tensor], batch: Tensors) -> Tensor:
        counts, targets = batch
        embedding, *classifier = params
        # Scaled as of one word, whatever the number of words.
        return cross_entropy(layers(counts @ embedding * self.LENGTH, classifier, "relu"), targets)


@dataclass(frozen=True)
class Sequences:
    """The next token of a noisy walk that is repeated once, by one layer of attention and one of a
    perceptron: its first half is predicted by pairs of tokens, its second half by attention.
    """

    tokens: int
    width: int
    batch_size: int = 16

    HALF = 6

    @property
    def name(self) -> str:
        return f"sequences {self.tokens}-{self.width}"

    def shapes(self) -> list[tuple[int, ...]]:
        width = self.width
        embeddings = [(self.tokens, width), (2 * self.HALF - 1, width)]
        attention = [(width, 3 * width), (width, width)]
        return [*embeddings, *attention, *layer_shapes((width, 2 * width, width, self.tokens))]

    def problems(self, n: int, device: torch.device) -> Tensors:
        follows = torch.rand(n, self.tokens, device=device).argsort(-1)
        walk = [torch.arange(self.tokens, device=device).expand(n, -1)]
        for _ in range(self.HALF - 1):
            walk.append(follows.gather(1, walk[-1]))
        # [n, tokens to start with, steps]
        return torch.stack(walk, -1), torch.rand(n, 1, 1, device=device)

    def batch(self, problems: Tensors) -> Tensors:
        walks, noise = problems
        start = drawn_classes(len(walks), self.batch_size, self.tokens, walks.device)
        first = walks.gather(1, start[..., None].expand(-1, -1, self.HALF))
        chance = torch.rand(first.shape, device=walks.device)
        first = torch.where(chance < noise, torch.randint_like(first, self.tokens), first)
        return (one_hot(torch.cat([first, first], -1), self.tokens),)

    def loss(self, params: Sequence[Tensor], batch: Tensors) -> Tensor:
        (tokens,) = batch
        embedding, places, attention, output, *perceptron = params
        x = tokens[..., :-1, :] @ embedding + places
        q, k, v = (normal(x) @ attention).chunk(3, -1)
        weights = (q @ k.mT) * self.width**-0.5
        later = torch.ones(weights.shape[-2:], device=x.device).triu(1)
        x = x + torch.softmax(weights - 1e4 * later, -1) @ v @ output
        hidden = layers(normal(x), perceptron[:4], "gelu")
        return cross_entropy(normal(x + hidden) @ perceptron[4] + perceptron[5], tokens[..., 1:, :])


def training_tasks() -> list[Task]:
    """The tasks that the network is trained on."""
    return [
        Regression((16, 8)),
        Regression((8, 32, 4)),
        Regression((6, 24, 24, 1), "relu"),
        Classification((16, 32, 10)),
        Classification((24, 48, 5), "gelu", clusters=3),
        Classification((12, 16, 16, 16, 8), "tanh"),
        Images((8, 16)),
        Images((6, 24), classes=6),
        Bags(64, 16),
        Sequences(12, 16),
    ]


def held_out_tasks() -> list[Task]:
    """Tasks of other forms, for its trials."""
    return [
        Regression((12, 48, 32, 3), "gelu"),
        Classification((32, 64, 32, 10)),
        Images((16, 32)),
        Bags(128, 24, classes=12),
        Sequences(20, 32),
    ]
