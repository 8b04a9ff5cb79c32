"""Image completion on scikit-learn's handwritten digits.

A task is one 8 x 8 image: x the coordinates of a pixel in [-1, 1]^2, y = (v + u) / 17 - 1/2 its
intensity v in {0 ... 16} with uniform noise u ~ U[0, 1). The noise makes a density of a number that
takes 17 values: without it a narrow enough mixture component on one value has any likelihood at
all; with it no model can pass log 17 = 2.83 per pixel, and whatever it reaches, less log 17, is a
lower bound of its log-probability of the 17 values.

1497 images are for training, 300 are held out, always the same ones. The reference is one Gaussian
per pixel, fitted to the training images: what is known of a pixel without looking at the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

from .sizes import Size
from .task import Sampler, Task, normal_log_likelihood

SIDE = 8
PIXELS = SIDE * SIDE
LEVELS = 17
HELD_OUT = 300


def pixel_of(x: Tensor) -> Tensor:
    """The number ``[...]`` of the pixel at coordinates ``x [..., 2]``, row by row."""
    cell = ((x + 1.0) * (0.5 * (SIDE - 1))).round().long()
    return cell[..., 0] * SIDE + cell[..., 1]


@functools.cache
def intensities() -> Tensor:
    """The intensities of all images, ``[1797, 64]``, read once; every sampler takes copies."""
    return torch.from_numpy(load_digits().images).reshape(-1, PIXELS)


@dataclass(eq=False, kw_only=True)
class Digits(Sampler):
    """Pixels of a digit given others of the same image.

    Args:
        held_out: take the held-out images instead of the training ones.
        context_size: M; by default uniform from 4 to 48, one for the whole batch.
        target_size: N; by default all the other pixels.
        ragged: a context size for each task instead.
        device: where the images lie and the tasks are made.
        seed: of both generators.
    """

    x_width = 2
    default_context = Size(4, 48)
    reference = "per-pixel Gaussian"

    held_out: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.contexts.high + (self.target_size.high if self.target_size else 1)
        if most > PIXELS:
            raise ValueError(
                f"an image has {PIXELS} pixels, of which one or more are targets; got sizes that "
                f"add up to {most}"
            )
        values = intensities()
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
        training, rest = values[order[HELD_OUT:]], values[order[:HELD_OUT]]
        noise_variance = 1.0 / 12.0
        self.pixel_mean = ((training.mean(0) + 0.5) / LEVELS - 0.5).to(self.device)
        self.pixel_variance = ((training.var(0) + noise_variance) / LEVELS**2).to(self.device)
        self.values = (rest if self.held_out else training).float().to(self.device)
        line = torch.linspace(-1.0, 1.0, SIDE)
        self.coordinates = torch.cartesian_prod(line, line).to(self.device)

    def default_targets(self, context: int) -> Size:
        return Size(PIXELS - context, PIXELS - context)

    def sample_sized(self, batch: int, context: int, targets: int) -> Task:
        images = len(self.values)
        image = torch.randint(images, (batch,), generator=self.generator, device=self.device)
        return self.sample_of(image, context, targets)

    def sample_of(self, image: Tensor, context: int, targets: int) -> Task:
        """Tasks of the images numbered ``image [B]``, their pixels in an order of their own."""
        batch, points = len(image), context + targets
        pixel = self.uniform(0.0, 1.0, batch, PIXELS).argsort(dim=1)[:, :points]
        intensity = self.values[image] + self.uniform(0.0, 1.0, batch, PIXELS)
        y = (intensity / LEVELS - 0.5).gather(1, pixel).unsqueeze(-1)
        x = self.coordinates[pixel]
        truth = {"image": image}
        return Task(x[:, :context], y[:, :context], x[:, context:], y[:, context:], truth)

    def reference_log_likelihood(self, task: Task) -> Tensor:
        pixel = pixel_of(task.x_target).unsqueeze(-1)
        return normal_log_likelihood(
            task.y_target, self.pixel_mean[pixel], self.pixel_variance[pixel]
        )
