"""Every line of docs/migration.md runs, and no name that one may come with is missing there."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from fusewright_models.bench.__main__ import app as bench
from fusewright_models.cli import app
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/migration.md"
SECTIONS = PAGE.read_text().split("\n## ")[1:] if PAGE.exists() else []
NAMES = """
HAS_TRITON HAS_FLA triton_sparse_attention pytorch_sparse_attention triton_gated_indexer
pytorch_gated_indexer triton_sinkhorn_knopp pytorch_sinkhorn_knopp triton_rmsnorm pytorch_rmsnorm
TritonRMSNorm fla_gated_delta_rule chunk_gated_delta_rule use_triton_kernel delta_recurrence_mode
_saved_selection force() fused_indexer_topk model_1b
memory_mlp_forward_loss_kernel memory_mlp_backward_update_kernel fused_adamw_kernel
fused_layernorm_linear_kernel nested_controller.py deep_nested_optimizer.py
neural_memory_update_kernel lo_kernel velo_kernel torchopt titans::memory_update
pretrain.py benchmark_optimizations.py rms_norm_kernel fused_silu_mul_kernel SlidingWindowAttention
cuda_optimizations.py
model.py attention_sdpa.py triton_fwd.py triton_bwd.py triton_fused_attn.py triton_fp8_attn.py
triton_fused_mlp.py grouped_gemm.py triton_gmm_logprob.py checkpoint.py cuda_graphs.py
run_benchmark.py
triton_sparse_attn.py triton_indexer.py triton_sinkhorn.py triton_rmsnorm.py fla_deltanet.py
neural_memory.py kernels/adamw.py kernels/memory_mlp.py kernels/layernorm_linear.py
triton_kernels.py `attention.py` bench/harness.py bench/shapes.py donated_buffer compiled_autograd
_dynamo.disable torchopt.implicit.custom_root learned_optimizer.cu velo_kernel.cu
"""

# What makes a command's run a short one, behind its own flags.
SMALL = {
    "hybrid": "--preset tiny --seq-len 20 --batch-size 2 --steps 1 --backend reference",
    "titan-mac": "--preset tiny --seq-len 32 --batch-size 2 --steps 1 --backend reference",
    "transformer-np": "--preset tiny --steps 1 --batch-size 2 --no-capture",
}

# Wheels are tested without the sources beside them.
pytestmark = pytest.mark.skipif(not SECTIONS, reason="docs/ is not beside these tests")


def lines_of(section: str) -> list[tuple[str, str]]:
    """The two columns of the section's tables, without the code's marks."""
    rows = [row for row in section.splitlines() if row.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]
    assert all(len(row) == 2 and re.fullmatch("`[^`]+`", row[1]) for row in cells)
    return [(there, here.strip("`")) for there, here in cells]


def parsed(command: list[str], program: typer.Typer, name: str) -> None:
    """By the program's own flags; nothing is run."""
    found, rest = typer.main.get_command(program), command
    if command and command[0] in found.commands:
        found, rest = found.commands[command[0]], command[1:]
    found.make_context(name, list(rest))


def run(line: str, namespace: dict) -> None:
    words = shlex.split(line)
    if words[:2] == ["pip", "install"]:
        assert all((ROOT / folder / "pyproject.toml").is_file() for folder in words[2:])
    elif words[0] == "fusewright-train":
        parsed(words[1:], app, words[0])
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2])
        parsed(words[3:], bench, words[2])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        exec(compile(line, str(PAGE), "exec"), namespace)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition(":")[0])
def test_every_line_runs(section):
    torch.manual_seed(0)
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), namespace)
    lines = lines_of(section)
    assert len(lines) >= 8
    for _, here in lines:
        run(here, namespace)


def recurrence(q, k, v, alpha, beta, scale):
    """S' = alpha S; S = S' + k (beta (v - S'^T k))^T; o = scale S^T q, token by token."""
    state, out = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = alpha[:, t, :, None, None] * state
        error = v[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * error).unsqueeze(-2)
        out.append(scale * (q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out, 1)


def with_matches(q, k, v, alpha, beta, weight):
    """alpha and beta have one more axis."""
    o = recurrence(q, k, v, alpha[..., 0], beta[..., 0], 1.0)
    return o + (weight * (q * k).sum(-1)).unsqueeze(-1) * v


# What functions there take, in their order, and what they compute of it.
THERE = {
    "fla_gated_delta_rule": ("BTHK BTHK BTHV BTH1 BTH1 H", with_matches),
    "chunk_gated_delta_rule": (
        "BTHK BTHK BTHV BTH BTH",
        lambda q, k, v, g, beta: recurrence(q, k, v, g.exp(), beta, q.shape[-1] ** -0.5),
    ),
}


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", THERE)
def test_line_takes_the_shapes_of_its_function_there(name, heads):
    """Under the left column's names. The page's own tensors may have shapes that suit the line."""
    shapes, function = THERE[name]
    rows = [(x, section) for section in SECTIONS for x in lines_of(section) if f"`{name}(" in x[0]]
    [((there, here), section)] = rows
    namespace: dict = {}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], namespace)
    names = re.search(rf"{name}\((.*?)\)", there)[1].split(", ")
    sizes = {"B": 2, "T": 5, "H": heads, "K": 8, "V": 4, "1": 1}
    torch.manual_seed(0)
    drawn = [torch.rand([sizes[x] for x in shape]).double() for shape in shapes.split()]
    if name == "chunk_gated_delta_rule":
        drawn[3] = drawn[3].log()
    found = eval(here, namespace | dict(zip(names, drawn, strict=False)))
    torch.testing.assert_close(found, function(*drawn))
    for x, shape in zip(names, shapes.split(), strict=False):
        assert namespace[x].ndim == len(shape)


def commands() -> list[str]:
    """Those of the training program that fetch nothing."""
    lines = [here for section in SECTIONS for _, here in lines_of(section)]
    return [x for x in lines if x.startswith("fusewright-train") and "--wandb" not in x]


@pytest.mark.usefixtures("without_pictures", "short_samples")
@pytest.mark.parametrize("line", commands())
def test_training_command_runs(line, tmp_path, text):
    """One step of the smallest preset; its own flags stand before those."""
    _, name, *flags = shlex.split(line)
    flags += [*SMALL[name].split(), "--out", str(tmp_path / "run")]
    if name != "transformer-np":
        flags += ["--dataset", str(text)]
    result = CliRunner().invoke(app, [name, *flags])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run/metrics.jsonl").is_file()


@pytest.mark.parametrize("name", NAMES.split())
def test_name_is_on_the_page(name):
    there = [there for section in SECTIONS for there, _ in lines_of(section)]
    told = PAGE.read_text() if name in ("triton_fp8_attn.py", "checkpoint.py") else " ".join(there)
    assert name in told


def test_line_that_does_not_run_is_noticed():
    for line, error in (
        ("fusewright-train hybrid --presto", Exception),
        ("pip install ./packages/none", AssertionError),
        ("python packages/none.py", AssertionError),
        ("rms_norm(1)", NameError),
    ):
        with pytest.raises(error):
            run(line, {})
