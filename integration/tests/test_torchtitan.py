"""TitanMAC and HybridLM in torchtitan's program, on CPUs over gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fusewright_models.models.hybrid import HYBRID, HybridLM
from fusewright_models.models.titan_mac import TITAN_MAC, TitanMAC

pytest.importorskip(
    "torchtitan", reason="the extra torchtitan, of nox -s torchtitan, is not installed"
)
SHAPES = {"titan_mac": TITAN_MAC["tiny"], "hybrid": HYBRID["tiny"]}
EPS = torch.finfo(torch.float32).eps
STEPS, BREAK, ROWS, LENGTH = 10, 6, 4, 64
SECONDS = 240
# How many steps are those of one process: the second sees the averages of the first, and a key that
# is selected or not by a rounding makes a later one another.
ALIKE = {"titan_mac": STEPS, "hybrid": 2}


def run(folder: Path, name: str, processes: int, *flags: str) -> list[dict]:
    """Steps, losses and norms of gradients that a run has told, from where it began."""
    told = folder / f"{name}-{processes}.json"
    text = folder / "text.txt"
    text.write_text("\n".join(f"{k} times {k} is {k * k}" for k in range(3000)))
    settings = {
        "--config": f"{name}_tiny",
        "--training.steps": STEPS,
        "--training.seq-len": LENGTH,
        "--training.local-batch-size": ROWS // processes,
        "--training.mixed-precision-param": "float32",
        "--debug.seed": 1,
        "--dataloader.dataset-path": text,
        "--dump-folder": folder / str(processes),
    }
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    program += [processes, Path(__file__).with_name("torchtitan_on_cpu.py"), told]
    program += ["--module", "fusewright_models.torchtitan", *flags]
    done = subprocess.run(
        [str(x) for x in (*program, *(x for pair in settings.items() for x in pair))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(told.read_text())


@pytest.mark.parametrize("name", SHAPES)
def test_two_processes_train_as_one_and_go_on(name, tmp_path):
    saved = ["--checkpoint.enable", "--checkpoint.interval", str(BREAK)]
    two, one = run(tmp_path, name, 2, *saved), run(tmp_path, name, 1)
    assert [line["step"] for line in two] == list(range(1, STEPS + 1))
    assert two[-1]["loss"] < two[0]["loss"]
    for mine, theirs in zip(two[: ALIKE[name]], one, strict=False):
        for what in ("loss", "norm"):
            # fp32, rounded otherwise in each step.
            assert mine[what] == pytest.approx(theirs[what], rel=8 * STEPS * EPS), what
    shutil.rmtree(tmp_path / "2/checkpoint" / f"step-{STEPS}")
    assert run(tmp_path, name, 2, *saved) == two[BREAK:]


def spec(name, **options):
    from fusewright_models.torchtitan import register

    return register(name, "tiny", SHAPES[name], **options)


@pytest.mark.parametrize(("name", "kind"), [("titan_mac", TitanMAC), ("hybrid", HybridLM)])
def test_weights_have_the_names_that_the_models_give_them(name, kind):
    made = spec(name)
    model = made.model.build()
    adapter = made.state_dict_adapter(made.model, None)
    state = model.state_dict()
    theirs = kind(SHAPES[name])
    theirs.load_state_dict(adapter.to_hf(state))
    back = adapter.from_hf(theirs.state_dict())
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    tokens = torch.arange(32).view(1, 32)
    hidden = theirs(tokens)
    logits = theirs.logits(hidden[0] if isinstance(hidden, tuple) else hidden)
    assert torch.equal(model(tokens), logits)


@pytest.mark.parametrize("name", SHAPES)
def test_models_without_memory_are_drawn_as_others(name):
    torch.manual_seed(3)
    expected = spec(name).model.build().state_dict()
    with torch.device("meta"):
        model = spec(name).model.build()
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights(buffer_device=None)
    assert all(torch.equal(x, expected[key]) for key, x in model.state_dict().items())


def test_loss_of_a_batch_is_its_part_of_the_mean_over_all_tokens():
    from fusewright_models.torchtitan import Loss

    loss = Loss.Config().build(compile_config=None)
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 2, -100], [0, -100, 4]])
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    of_model, _ = loss(mean, labels, torch.tensor(7))
    of_logits, _ = loss(logits, labels, torch.tensor(7))
    assert of_model.item() == pytest.approx(mean.item() * 4 / 7, rel=4 * EPS)
    assert of_logits.item() == pytest.approx(of_model.item(), rel=4 * EPS)


def config(**changed):
    from fusewright_models.torchtitan import CONFIGS

    found = CONFIGS["titan_mac_tiny"]()
    for place, value in changed.items():
        section, _, field = place.partition("__")
        setattr(getattr(found, section) if field else found, field or section, value)
    return found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parallelism__tensor_parallel_degree": 2}, "got tensor_parallel_degree 2"),
        ({"parallelism__pipeline_parallel_degree": 2}, "got pipeline_parallel_degree 2"),
        ({"parallelism__spmd_backend": "spmd_types"}, "got spmd_types"),
        ({"activation_checkpoint": SimpleNamespace()}, "got SimpleNamespace"),
        ({"compile__enable": True}, "got compile.enable"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_models_do_not_take_is_refused(changed, said):
    asked = config(**changed)
    with pytest.raises(ValueError, match=said):
        asked.model_spec.model.update_from_config(config=asked)


def test_optimizers_are_torchtitans_or_ours():
    from fusewright.optimizer import AdamW
    from fusewright_models.torchtitan import Optimizers
    from torchtitan.components.optimizer import ParamGroupConfig

    model = torch.nn.Linear(3, 3)
    for name, kind in (("fusewright.AdamW", AdamW), ("AdamW", torch.optim.AdamW)):
        options = {"pattern": ".*", "optimizer_name": name, "optimizer_kwargs": {"lr": 0.1}}
        groups = [ParamGroupConfig(**options)]
        made = Optimizers.Config(param_groups=groups, implementation="for-loop")
        assert type(made.build(model_parts=[model]).optimizers[0]) is kind
