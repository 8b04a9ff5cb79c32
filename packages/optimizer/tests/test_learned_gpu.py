"""What only a GPU shows of LearnedOptimizer and VeLO, besides what test_gpu.py asks of both."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.learned.learned_optimizer import LearnedOptimizer
from fusewright.optimizer.learned.learned_update import learned_init, learned_update
from fusewright.optimizer.velo.velo import VeLO
from fusewright_testkit import Yardstick, capture, no_synchronisation

pytestmark = pytest.mark.gpu

SHAPES = ((3,), (), (130, 70), (64, 32, 3, 3), (0, 4), (1, 5000))


def test_gradients_of_the_network_are_as_near_to_fp64_as_autograds(learned):
    p = learned.drawn([(130, 70)], "cuda")[0]
    mlp = learned.network(device="cuda")
    names = [name for name, _ in mlp.named_parameters() if "offsets" not in name]

    def by(backend):
        def op(*weights):
            dtype = weights[0].dtype
            some = [p.to(dtype)], [learned.gradient(p, 0).to(dtype)], learned_init([p.to(dtype)])
            given = dict(zip(names, weights, strict=True))
            mlp.to(dtype)
            found, _ = torch.func.functional_call(mlp, given, some, {"backend": backend})
            mlp.float()
            return found[0]

        return op

    weights = [x.detach().clone() for x in mlp.weights()]
    Yardstick(by("reference"), weights, [torch.cos(p)]).check(by("triton"))


def test_replayed_step_reads_the_networks_weights_as_they_are(learned):
    ps = [torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")]
    optimizer = LearnedOptimizer(ps, learned.network(device="cuda"), lr=0.1)
    source = [torch.sin(p.detach()) for p in ps]

    def step():
        for p, g in zip(ps, source, strict=True):
            p.grad = g * 1.0
        optimizer.step()

    graph, _ = capture(step)
    before = [p.detach().clone() for p in ps]
    with torch.no_grad():
        optimizer.mlp.last.weight.zero_()
        optimizer.mlp.last.bias.zero_()
    graph.replay()
    assert all(map(torch.equal, ps, before))


def test_neither_extra_features_nor_gradients_wait_for_the_gpu(learned):
    mlp = learned.network(extra=1, device="cuda")
    told = torch.ones(1, device="cuda")
    ps = [torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")]
    optimizer = LearnedOptimizer(ps, mlp, extra_features=told, max_grad_norm=1.0)
    gradients = [torch.ones_like(p) for p in ps]
    plain = [p.detach().clone() for p in ps]
    kept = learned_init(plain)
    given = [told] * len(ps)
    with no_synchronisation():
        # With the first, which plans, and one whose gradients lie elsewhere and are fewer.
        for step in range(3):
            for p, g in zip(ps, gradients, strict=True):
                p.grad = g.clone() if step else g
            if step == 2:
                ps[0].grad = None
            optimizer.step()
        updates, _ = learned_update(mlp, plain, gradients, kept, given)
        sum(u.sum() for u in updates).backward()


@pytest.mark.large
def test_matrix_of_more_than_31_bits_is_moved_to_its_end():
    from fusewright.optimizer.learned.learned_update import UpdateMLP

    p = torch.nn.Parameter(torch.zeros(2**16 + 1, 2**15, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.ones_like(p)
    mlp = UpdateMLP().cuda()
    with torch.no_grad():
        # One direction for all.
        mlp.last.weight.zero_()
        mlp.last.bias.copy_(torch.tensor([50.0, 0.0]))
    LearnedOptimizer([p], mlp, lr=1.0, backend="triton").step()
    assert (p == -0.5).all()


@pytest.mark.large
def test_matrix_of_more_than_31_bits_is_moved_to_its_end_by_velo(learned):
    p = torch.nn.Parameter(torch.ones(2**16 + 1, 2**15, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.ones_like(p)
    networks = learned.velo_networks("cuda")
    VeLO([p], networks, 20, lr=1.0, backend="triton").step(1.0)
    # Alike wherever they are, since everything that is seen of them is.
    assert (p == p[0, 0]).all()
    assert p[0, 0] != 1.0
