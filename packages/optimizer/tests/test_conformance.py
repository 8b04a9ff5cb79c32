"""What holds of the package as a whole."""

from __future__ import annotations

from fusewright_testkit.conformance import Package
from fusewright_testkit.conformance.package import *  # noqa: F403

PACKAGE = Package(
    "fusewright.optimizer",
    names=(
        "AdamW AdamWState DeepMomentum DeepNestedOptimizer DeltaMomentum FunctionalAdamW "
        "FunctionalLearnedOptimizer LearnedOptimizer M3 Muon NestedController UpdateMLP VeLO "
        "VeLONetworks clip_grad_norm_ grad_norm group_of learned_apply learned_init "
        "learned_update load_update_mlp load_velo newton_schulz parameter_groups "
        "trained_update_mlp"
    ),
    registered="",
    without_triton=(
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        "AdamW([p], lr=0.5, betas=(0.0, 0.0), weight_decay=0.0).step()\n"
        "assert p.tolist() == [0.5, 0.5, 0.5]\n"
        "assert grad_norm([torch.tensor([3.0, 4.0])]).item() == 5.0\n"
    ),
)
