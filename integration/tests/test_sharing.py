"""Processes that share the rows of tasks have the losses and gradients of one that has them all."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.data import make_sampler
from fusewright_models.data.sizes import Size

from .groups import run_group

CASES = {
    "pre": dict(norm="pre"),
    "post": dict(norm="post"),
    "block": dict(checkpointing="block"),
    "keep-attention": dict(checkpointing="keep-attention"),
}
PROGRAM = """
from fusewright_models.data import make_sampler
from fusewright_models.data.sizes import Size
from fusewright_models.models.transformer_np import TransformerNP, TransformerNPConfig

torch.manual_seed(0)
sizes = dict(context_size=Size.parse("{context}"), target_size=Size.parse("8"))
sampler = make_sampler("blr", **sizes)
widths = dict(x_width=sampler.x_width, width=32, feed_forward_width=40)
config = TransformerNPConfig(layers=3, heads=2, components=3, **widths, **{of})
model = TransformerNP(config).double()
task = sampler.sample({batch})

def losses(task, called):
    rows = [x.double() for x in (task.x_context, task.y_context, task.x_target, task.y_target)]
    return called(*rows[:3], y_target=rows[3], group=task.group)

whole = losses(task, model)
expected = torch.autograd.grad(whole, list(model.parameters()))
part = processes.rows(task, {batch})
assert part.x_context.shape[1] * processes.count == task.x_context.shape[1]
wrapped = processes.wrapped(model)
mine = losses(part, wrapped)
mine.backward()
bound = 2**20 * torch.finfo(torch.float64).eps
shared = mine.detach().clone()
processes.average_(shared)
assert abs(shared - whole) <= bound * abs(whole)
for p, expect in zip(model.parameters(), expected, strict=True):
    assert (p.grad - expect).abs().max() <= bound * expect.abs().max()
# Each has its own part of the targets.
assert processes.told(float(mine)).count(float(mine)) == 1
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "batch", "count"),
    [("pre", 1, 2), ("post", 3, 4), ("block", 2, 2), ("keep-attention", 1, 2)],
)
def test_shared_rows_have_the_losses_and_gradients_of_whole_tasks(case, batch, count):
    run_group(PROGRAM.format(context=16, batch=batch, of=CASES[case]), count, parallel="context")


def test_an_evaluation_reads_a_part_of_the_rows_and_scores_whole_tasks():
    """More batches than processes, so that nothing hides behind a batch of one's own."""
    run_group(
        """
from dataclasses import astuple
from fusewright_models.data import Evaluator, make_sampler
from fusewright_models.data.sizes import Size
from fusewright_models.models.transformer_np import TransformerNP, TransformerNPConfig

torch.manual_seed(0)
sizes = dict(context_size=Size.parse("16"), target_size=Size.parse("8"))
sampler = make_sampler("blr", held_out=True, **sizes)
widths = dict(x_width=sampler.x_width, width=32, feed_forward_width=40)
model = TransformerNP(TransformerNPConfig(layers=2, heads=2, components=3, **widths)).eval()
read = []
model.embedder.register_forward_hook(lambda module, rows, out: read.append(out.shape[:2]))
whole = Evaluator(sampler, batch_size=3).score(model.double(), 3)
assert read == [(3, 24)] * 3, read
read.clear()
for _ in range(2):
    shared = Evaluator(sampler, batch_size=3, processes=processes).score(model, 3)
# Sums of as many terms as a prediction has, in another order.
bound = 2**20 * torch.finfo(torch.float64).eps
for one, other in zip(astuple(whole), astuple(shared), strict=True):
    one, other = (torch.tensor(x, dtype=torch.float64) for x in (one, other))
    assert (one - other).abs().max() <= bound * one.abs().max(), (one, other)
assert read == [(3, 12)] * 6, read
""",
        2,
        parallel="context",
    )


def test_gathered_rows_of_narrow_numbers_add_their_gradients_in_fp32():
    run_group(
        """
from fusewright_models.models.transformer_np.sharing import of_all_rows
k = torch.full((1, 2, 1, 4), 1.0 + processes.rank, dtype=torch.bfloat16, requires_grad=True)
v = (2.0 * k).detach().requires_grad_()
keys, values = of_all_rows(k, v, torch.distributed.group.WORLD)
assert keys.shape == (1, 6, 1, 4)
assert torch.equal(keys[0, :, 0, 0], torch.tensor([1, 1, 2, 2, 3, 3], dtype=torch.bfloat16))
assert torch.equal(values, 2.0 * keys)
# In bf16 256 and 1 are 256, twice over.
dk = torch.full_like(keys, [256.0, 1.0, 1.0][processes.rank])
torch.autograd.backward([keys, values], [dk, dk])
assert torch.equal(k.grad, torch.full_like(k, 258.0))
assert torch.equal(v.grad, k.grad)
""",
        3,
        parallel="context",
    )


class Group:
    def size(self):
        return 2


@pytest.mark.parametrize(
    ("sizes", "ragged", "message"),
    [
        (("5", "8"), False, "as many context points and targets for each of 2 .* got 5 and 8"),
        (("6", "3"), False, "got 6 and 3"),
        (("2-8", "8"), True, "wanted tasks of one size, whose rows processes share; got lengths"),
    ],
)
def test_rows_that_cannot_be_shared_are_refused(sizes, ragged, message):
    context, target = map(Size.parse, sizes)
    sampler = make_sampler("blr", context_size=context, target_size=target, ragged=ragged)
    with pytest.raises(ValueError, match=message):
        sampler.sample(2).part_of_rows(0, Group())


def test_lengths_beside_a_group_are_refused():
    from fusewright_models.models.transformer_np import TransformerNP, TransformerNPConfig

    model = TransformerNP(TransformerNPConfig(x_width=1, width=16, layers=1, heads=2))
    rows = torch.zeros(2, 4, 1)
    with pytest.raises(ValueError, match="wanted tasks without lengths, whose rows a group shares"):
        model(rows, rows, rows, torch.tensor([1, 2]), group=Group())
