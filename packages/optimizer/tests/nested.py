"""What the tests of DeepNestedOptimizer share: a small model, gradients and losses with what is not
finite among them, and the step as branches on the host, in fp64.
"""

from __future__ import annotations

import copy
import math

import torch
from fusewright.optimizer.nested.deep_nested_optimizer import DeepNestedOptimizer

from .compared import assert_near

NAN, INF = float("nan"), float("inf")
STEPS = 30
# By step: what the loss is then, and what one gradient has in it.
BAD_LOSSES = {3: NAN, 8: INF, 20: -INF}
BAD_GRADIENTS = {5: NAN, 12: INF, 25: -INF}


class Model(torch.nn.Module):
    """An embedding, two layers, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = torch.nn.Embedding(4, 3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
        self.norm = torch.nn.LayerNorm(3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)


def model(dtype=torch.float64, device="cpu"):
    torch.manual_seed(3)
    return Model().to(device, dtype)


def optimizer_of(some, **options):
    """With a controller whose multipliers differ from 1."""
    torch.manual_seed(4)
    optimizer = DeepNestedOptimizer(some, **{"base_lr": 1e-2, "mode": "explicit"} | options)
    with torch.no_grad():
        optimizer.controller.layers[-1].weight.normal_()
    return optimizer


def give(some, step):
    """Gradients of a step; returns its loss."""
    generator = torch.Generator().manual_seed(step)
    for p in some.parameters():
        drawn = torch.randn(p.shape, generator=generator) * (1 + step % 3) / 4
        p.grad = drawn.to(p.device, p.dtype)
    if step in BAD_GRADIENTS:
        some.layers[1].weight.grad[1, 2] = BAD_GRADIENTS[step]
    return BAD_LOSSES.get(step, 3.0 / (1 + step))


def norm(tensors):
    return math.sqrt(sum(x.double().square().sum().item() for x in tensors))


class Eager:
    """The step with branches: what comes before parameters move, and AdamW."""

    def __init__(self, some, optimizer):
        self.options = optimizer.options
        ours = {
            id(p): q
            for p, q in zip(optimizer._all_parameters(), twins(some, optimizer), strict=True)
        }
        self.groups = [
            {**group, "params": [ours[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        self.controller = copy.deepcopy(optimizer.controller).double()
        self.t, self.ema = 0, None
        self.multipliers = [1.0 for _ in self.groups]
        self.states = {}
        names = "params", "betas", "eps", "weight_decay"
        groups = [{name: group[name] for name in names} for group in self.groups]
        self.adamw = torch.optim.AdamW(groups)

    def step(self, loss):
        """Returns whether it was skipped."""
        self.t += 1
        if not math.isfinite(loss):
            return True
        self.ema = loss if self.ema is None else 0.9 * self.ema + 0.1 * loss
        if self.t == 1 or self.t % self.options.controller_update_freq == 0:
            self.multipliers = self.control()
        found = norm(p.grad for group in self.groups for p in group["params"])
        if not math.isfinite(found):
            return True
        factor = min(1.0, self.options.max_grad_norm / (found + 1e-6))
        self.move(factor, loss)
        return False

    def control(self):
        rows = [
            [norm(p.grad for p in group["params"]), norm(group["params"]), group["depth"]]
            for group in self.groups
        ]
        if not all(math.isfinite(x) for row in rows for x in row):
            return [1.0 for _ in rows]
        found = []
        for g, p, depth in rows:
            if self.options.features == "log":
                g, p = math.log1p(g), math.log1p(p)
            x = torch.tensor([g, p, depth], dtype=torch.float64)
            *inner, last = self.controller.layers
            for layer in inner:
                x = torch.clamp(layer.weight @ x + layer.bias, min=0.0)
            out = (last.weight @ x + last.bias).item()
            m = 0.1 + 1.9 / (1.0 + math.exp(-out))
            found.append(min(max(m, 0.1), 2.0) if math.isfinite(out) else 1.0)
        return found

    def move(self, factor, loss):
        known = zip(self.groups, self.adamw.param_groups, self.multipliers, strict=True)
        for group, own, m in known:
            own["lr"] = group["lr"] * m
            for p in group["params"]:
                p.grad *= factor
        self.adamw.step()


def twins(some, optimizer):
    """A copy of each parameter, in the optimizer's order."""
    names = {id(p): name for name, p in some.named_parameters()}
    copied = dict(copy.deepcopy(some).double().named_parameters())
    return [copied[names[id(p)]] for p in optimizer._all_parameters()]


def assert_followed(some, optimizer, eager, steps=STEPS, before=None):
    """Steps of both, with the same gradients, agree in everything; in fp64."""
    pairs = [
        (p, q)
        for group, other in zip(optimizer.param_groups, eager.groups, strict=True)
        for p, q in zip(group["params"], other["params"], strict=True)
    ]
    for step in range(1, steps + 1):
        loss = give(some, step)
        for p, q in pairs:
            q.grad = p.grad.clone()
        if before is not None:
            before(step)
        out = optimizer.step(torch.tensor(loss, dtype=torch.float64))
        skipped = eager.step(loss)
        assert out["skipped"].item() == skipped
        assert out["global_step"].item() == step
        expected = torch.tensor(eager.multipliers, dtype=torch.float64)
        assert_near([out["lr_multipliers"]], [expected])
        if eager.ema is not None:
            assert_near([out["ema_loss"]], [torch.tensor(eager.ema, dtype=torch.float64)])
        for p, q in pairs:
            assert_near([p], [q])
