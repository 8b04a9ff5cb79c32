"""Mutations of the source that once survived the tests: each has to fail a quick test.

    python ci/mutations.py              all, one after the other
    python ci/mutations.py log1p        those whose name contains this

A mutation is made in a copy of the tracked files, where the tests that are named for it run as
``ci/quick.py`` runs them. ``ci/tests/test_mutations.py`` holds the table to the code.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import workspace

# What pytest returns where tests ran and one failed.
FAILED = 1
MIXTURES = "packages/mixture-head/src/fusewright/mixture_head/mixture"
OPTIMIZER = "packages/optimizer/src/fusewright/optimizer"
MODELS = "integration/src/fusewright_models"


class Mutation(NamedTuple):
    """``old``, which stands once in the file at ``path``, becomes ``new``; ``test`` of a part
    fails.
    """

    name: str
    part: str
    path: str
    old: str
    new: str
    test: str


MUTATIONS = (
    Mutation(
        "variance of TransformerNP's predict times 1.01",
        "integration",
        f"{MODELS}/models/transformer_np/model.py",
        "            self.head.variance(params),\n",
        "            1.01 * self.head.variance(params),\n",
        "test_prediction_holds_the_moments_and_a_draw_of_the_mixture",
    ),
    Mutation(
        "variance of a Gaussian process's predict times 1.01",
        "integration",
        f"{MODELS}/data/gaussian_process.py",
        "return mean, prior - explained.square().sum(1).unsqueeze(-1)",
        "return mean, 1.01 * (prior - explained.square().sum(1).unsqueeze(-1))",
        "test_oracle_is_the_ratio_of_joint_densities",
    ),
    Mutation(
        "mixture_variance times 1.01",
        "mixture-head",
        f"{MIXTURES}/distribution.py",
        "return (weight * (sigma.square() + (mean - center).square())).sum(-1)",
        "return 1.01 * (weight * (sigma.square() + (mean - center).square())).sum(-1)",
        "test_moments_and_distribution_function_are_those_of_torch_distributions",
    ),
    Mutation(
        "log1p_exact as log(1 + x)",
        "mixture-head",
        f"{MIXTURES}/kernels.py",
        "return tl.where(lost == 0.0, x, tl.log(total) * (x / tl.where(lost == 0.0, 1.0, lost)))",
        "return tl.log(total)",
        "test_small_softplus_scales_keep_their_last_places",
    ),
    Mutation(
        "attention's dq in fp32 without its correction",
        "attention",
        "packages/attention/src/fusewright/attention/common/tiles_backward.py",
        "dq -= missing[:, None] * (pk * inverse_sum[:, None])",
        "dq -= 0.0 * missing[:, None]",
        "test_values_and_gradients",
    ),
    Mutation(
        "attention's delta in fp32 without its correction",
        "attention",
        "packages/attention/src/fusewright/attention/common/tiles_backward.py",
        "tl.store(delta_ptr + at, delta + missing, mask=inside)",
        "tl.store(delta_ptr + at, delta, mask=inside)",
        "test_values_and_gradients",
    ),
    Mutation(
        "the bound of a step's norm at 2^90",
        "optimizer",
        f"{OPTIMIZER}/common/step.py",
        "511 if x == torch.float64 else 63",
        "511 if x == torch.float64 else 90",
        "test_squares_that_are_not_finite_are_not_stored",
    ),
    Mutation(
        "stochastic rounding with no shift, in plain torch",
        "optimizer",
        f"{OPTIMIZER}/adamw/reference.py",
        "start = (low * 0x9E3779B9 + number * 0x85EBCA6B) & LOW_32",
        "start = (low * 0x9E3779B9) & LOW_32",
        "test_stochastic_rounding_draws_apart_for_all_that_it_rounds",
    ),
    Mutation(
        "stochastic rounding without the parameter's place, in kernels",
        "optimizer",
        f"{OPTIMIZER}/adamw/kernels.py",
        "x = offsets.to(tl.uint32) * 0x9E3779B9 + tensor.to(tl.uint32) * 0x85EBCA6B",
        "x = offsets.to(tl.uint32) * 0x9E3779B9",
        "test_stochastic_rounding_draws_apart_for_all_that_it_rounds",
    ),
    Mutation(
        "stochastic rounding with one shift for all, in kernels",
        "optimizer",
        f"{OPTIMIZER}/adamw/kernels.py",
        "in_state(m, bits >> 16, CONFIG.STOCHASTIC, m_base)",
        "in_state(m, bits, CONFIG.STOCHASTIC, m_base)",
        "test_stochastic_rounding_draws_apart_for_all_that_it_rounds",
    ),
    Mutation(
        "TitanMAC's state not detached",
        "integration",
        f"{MODELS}/models/titan_mac/layers.py",
        "    cut = memory.detach_state(last)\n",
        "    cut = last\n",
        "test_gradient_through_the_memory_ends_with_the_call",
    ),
    Mutation(
        "NeuralMemory's state not detached",
        "memory-mlp",
        "packages/memory-mlp/src/fusewright/memory_mlp/layer/writing.py",
        '        if self.outer_grad != "full":\n            state = detached(state)\n',
        "",
        "test_detached_state_cuts_calls_and_no_more",
    ),
    Mutation(
        "M3's slow direction times 1.02",
        "optimizer",
        f"{OPTIMIZER}/matrix/m3.py",
        "slow_direction=direction.view_as(slow)",
        "slow_direction=1.02 * direction.view_as(slow)",
        "test_slow_direction_is_that_of_newton_schulz_to_the_bit",
    ),
)


def copied(into: Path) -> Path:
    """The tracked files of the repository, links as links, in an empty folder."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=workspace.ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(workspace.ROOT / name, target, follow_symlinks=False)
    return into


def survives(mutation: Mutation, tree: Path) -> bool:
    """Whether the test that is named for a mutation passes with it, in a copy of the files."""
    path = tree / mutation.path
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.path} must hold once: {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new))
    command = [sys.executable, "ci/quick.py", mutation.part, "-q", "-x", "-k", mutation.test]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if done.returncode not in (0, FAILED):
        raise RuntimeError(f"{mutation.name}: no test ran\n{done.stdout}{done.stderr}")
    return done.returncode != FAILED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", default="")
    wanted = parser.parse_args().name
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for mutation in MUTATIONS:
            if wanted in mutation.name:
                lives = survives(mutation, tree)
                print("SURVIVES" if lives else "fails a test", mutation.name, sep=": ", flush=True)
                survivors += [mutation.name] if lives else []
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
