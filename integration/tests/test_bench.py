from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fusewright_models import TransformerNPConfig
from fusewright_models.bench import harness, providers, transformer_np
from fusewright_models.bench.__main__ import main
from fusewright_models.bench.harness import Expected
from fusewright_models.bench.providers import PROVIDER_NAMES, Provider, chosen_providers
from fusewright_models.bench.results import COLUMNS, environment_name
from fusewright_models.bench.shapes import Shape, operations
from fusewright_models.bench.step import (
    STAGES,
    WARM_UP_STEPS,
    Measurement,
    Replayed,
    Step,
    Taken,
    Time,
)
from fusewright_models.bench.transformer_np import TransformerNPHarness
from fusewright_testkit import bench as testkit_bench
from fusewright_testkit import report as testkit_report
from torch.nn.attention import SDPBackend

from .commands import assert_refused, flags_of, invoke, rows_of

pytestmark = pytest.mark.usefixtures("without_collections")

EAGER = "sdpa-unpruned,sdpa,fusewright"
# What torch takes on the CPU stands in the row.
EAGER_ROWS = ["sdpa-unpruned (flash)", "sdpa (flash)", "fusewright"]
TINY = ["--preset", "tiny", "--seconds", "0"]
CASE = "M=8 N=6 B=2"
CUDA = torch.device("cuda")


def run(*arguments, device: str = "cpu", shape: str = "8,6,2"):
    return invoke(main, *TINY, "--shape", shape, "--device", device, *arguments)


def line_of(output: str, provider: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith(f"│ {provider} "))
    return line


def wrong_by(function, amount: float):
    return lambda *arguments, **options: function(*arguments, **options) + amount


def without_stages(of):
    return lambda cls, *arguments, **options: of(*arguments, **options)._replace(stages={})


def out_of_memory(*arguments, **options):
    raise torch.OutOfMemoryError("tried to allocate everything")


def test_every_provider_gets_its_stages_and_its_step(tmp_path):
    result = run("--provider", EAGER, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    assert [row["provider"] for row in rows[::5]] == EAGER_ROWS
    for step in (rows[start : start + 5] for start in range(0, len(rows), 5)):
        assert [row["pass"] for row in step] == [*STAGES, "step"]
        assert {row["case"] for row in step} == {CASE}
        assert {(row["op"], row["dtype"], row["timing"]) for row in step} == {
            ("TransformerNP", "bf16", "wall")
        }
        for row in step:
            assert 0.0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
            assert bool(row["tflops"]) == (row["pass"] in ("fwd", "bwd", "step"))
            assert row["gbps"] == row["mem_mib"] == ""
    for name in EAGER.split(","):
        taken = "fusewright" if name == "fusewright" else "flash"
        assert taken in line_of(result.output, name).split("│")[2]


def test_graph_of_a_step_is_a_row_of_its_own(tmp_path, monkeypatch):
    """Without a GPU the step stands for its replays."""
    monkeypatch.setattr(Replayed, "measured", Step.measure)
    timings = TransformerNPHarness.timings
    gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(TransformerNPHarness, "timings", lambda self, x: timings(gpu, x))
    monkeypatch.setattr(Measurement, "of", classmethod(without_stages(Measurement.of)))
    result = run("--provider", "fusewright-captured", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (row,) = rows_of(tmp_path)
    assert [row[name] for name in ("pass", "provider", "timing")] == [
        "step",
        "fusewright-captured",
        "graph",
    ]
    assert row["tflops"]
    assert "fusewright" in line_of(result.output, "fusewright-captured")


def test_graphs_are_not_captured_on_the_cpu(tmp_path):
    assert run("--provider", "fusewright-captured", "--out", tmp_path).exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compiled_providers_run(tmp_path):
    result = run("--provider", "sdpa-compile,fusewright-compile", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    names = ["sdpa-compile (eagerly flash)", "fusewright-compile"]
    assert [row["provider"] for row in rows_of(tmp_path)[::5]] == names


def test_rows_measured_again_replace_their_like(tmp_path):
    assert run("--provider", EAGER, "--out", tmp_path).exit_code == 0
    before = rows_of(tmp_path)
    assert run("--provider", "sdpa", "--out", tmp_path).exit_code == 0
    after = rows_of(tmp_path)
    key = testkit_report.COLUMNS[:6]
    assert [[row[name] for name in key] for row in before] == [
        [row[name] for name in key] for row in after
    ]
    changed = {one["provider"] for one, other in zip(before, after, strict=True) if one != other}
    assert changed == {"sdpa (flash)"}


def test_rows_measured_again_replace_those_of_another_attention(tmp_path, monkeypatch):
    assert run("--provider", "sdpa,fusewright", "--out", tmp_path).exit_code == 0
    monkeypatch.setattr(providers, "sdpa_backend", lambda *operands: SDPBackend.MATH)
    assert run("--provider", "sdpa", "--out", tmp_path).exit_code == 0
    assert [row["provider"] for row in rows_of(tmp_path)[::5]] == ["sdpa (math)", "fusewright"]


def test_nothing_is_kept_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("--provider", "sdpa").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_peer_that_fails_is_a_line_and_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "plain_loss", out_of_memory)
    result = run("--provider", EAGER, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "out of memory" in line_of(result.output, "sdpa")
    assert {row["provider"] for row in rows_of(tmp_path)} == {"fusewright"}


def test_ours_that_fails_is_a_line_and_an_exit_code(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(providers, "our_loss", broken)
    result = run("--provider", "fusewright,sdpa", "--out", tmp_path)
    assert result.exit_code == 1
    line = line_of(result.output, "fusewright")
    assert "RuntimeError: first line" in line
    assert "second" not in line
    assert {row["provider"] for row in rows_of(tmp_path)} == {"sdpa (flash)"}


def test_loss_of_one_target_is_within_its_allowance():
    result = run("--provider", "fusewright", shape="1,1,1")
    assert result.exit_code == 0, result.output


def test_wrong_loss_of_ours_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "our_loss", wrong_by(providers.our_loss, 0.1))
    result = run("--provider", "fusewright,sdpa", "--out", tmp_path)
    assert result.exit_code == 1
    assert "is not within" in line_of(result.output, "fusewright")
    assert {row["provider"] for row in rows_of(tmp_path)} == {"sdpa (flash)"}
    assert run("--provider", "fusewright", "--no-check").exit_code == 0


def test_wrong_loss_of_a_peer_is_told_and_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "plain_loss", wrong_by(providers.plain_loss, 0.1))
    result = run("--provider", "sdpa", "--out", tmp_path)
    assert result.exit_code == 0
    assert "sdpa: loss" in result.output
    assert len(rows_of(tmp_path)) == 5


def test_losses_that_cannot_be_held_against_anything_are_timed(monkeypatch):
    monkeypatch.setattr(transformer_np, "plain_log_likelihood", out_of_memory)
    result = run("--provider", "sdpa,fusewright")
    assert result.exit_code == 0
    assert f"{CASE}: nothing to hold losses against: out of memory" in result.output


def test_another_attention_than_the_one_asked_for_is_told(monkeypatch):
    monkeypatch.setattr(providers, "sdpa_backend", lambda *operands: SDPBackend.MATH)
    asked = run("--provider", "sdpa,fusewright", "--sdpa", "flash")
    assert "sdpa-flash: wanted flash attention, torch takes math" in asked.output
    assert "math" in line_of(asked.output, "sdpa-flash")
    left_open = run("--provider", "sdpa")
    assert "wanted" not in left_open.output
    assert "math" in line_of(left_open.output, "sdpa")


def test_rows_say_what_torch_takes_and_that_of_compiled_ones_it_is_known_eagerly(monkeypatch):
    monkeypatch.setattr(providers, "version_of", lambda name: "absent")
    taken = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    named = {
        kind: Provider(kind).row_name(Provider(kind).attention(taken)) for kind in PROVIDER_NAMES
    }
    assert named == {
        "sdpa-unpruned": "sdpa-unpruned (cudnn+flash)",
        "sdpa": "sdpa (cudnn+flash)",
        "sdpa-compile": "sdpa-compile (eagerly cudnn+flash)",
        "fa4": "fa4 (flash-attn-4 absent)",
        "fa4-compile": "fa4-compile (flash-attn-4 absent)",
        "fusewright": "fusewright",
        "fusewright-compile": "fusewright-compile",
        "fusewright-two-kernels": "fusewright-two-kernels",
        "fusewright-fp8": "fusewright-fp8",
        "fusewright-captured": "fusewright-captured",
    }


def test_torch_takes_the_attention_that_was_asked_for(small):
    model, shape = small(), Shape(8, 6, 2)
    for sdpa, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("math", SDPBackend.MATH)):
        provider = Provider("sdpa", sdpa)
        taken = provider.backends_taken(model, shape)
        assert taken == [backend]
        assert provider.warning(taken) is None


def test_providers_on_torchs_attention_run_once_for_each_choice_of_it():
    chosen = chosen_providers("sdpa,fusewright", "auto,cudnn")
    assert [provider.name for provider in chosen] == ["sdpa", "sdpa-cudnn", "fusewright"]
    assert [provider.name for provider in chosen_providers("all", "auto")] == [*PROVIDER_NAMES]


@pytest.mark.parametrize("provider", EAGER.split(","))
@pytest.mark.parametrize(
    "shape", [Shape(32, 16, 4), Shape(1, 6, 1), Shape(1, 1, 1)], ids=lambda shape: shape.case
)
def test_allowance_of_bf16_is_what_a_wrong_loss_exceeds(provider, shape):
    """A model that sees another context errs by more than rounding does."""
    config = TransformerNPConfig(width=32, layers=2, heads=2, feed_forward_width=85)
    measure = TransformerNPHarness(config, torch.device("cpu"), 0.0, True, None, None)
    expected = measure.expected(shape)
    assert 0.0 < expected.allowed < 0.1 * abs(expected.loss)
    (one,) = chosen_providers(provider, "auto")
    model, task = measure.model(), measure.sampler(shape).sample(shape.batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = float(one.loss_function()(model, task))
        other = float(one.loss_function()(model, measure.sampler(shape).sample(3)))
    assert expected.complaint(loss) is None
    assert "is not within" in expected.complaint(other)
    assert Expected(1.0, 0.1).complaint(float("nan"))


@pytest.mark.parametrize(
    ("shape", "batches"),
    [((1, 1, 1), 64), ((8, 6, 2), 6), ((8, 32, 2), 1)],
    ids=["M1-N1-B1", "M8-N6-B2", "M8-N32-B2"],
)
def test_allowance_is_the_largest_of_batches_of_64_targets(monkeypatch, shape, batches):
    config = TransformerNPConfig(width=16, layers=1, heads=1, feed_forward_width=21)
    measure = TransformerNPHarness(config, torch.device("cpu"), 0.0, True, None, None)
    # Loss and error of each batch, the greatest error in the middle.
    known = [(float(n), 1.0 - abs(n - batches // 2) / batches) for n in range(batches)]
    remaining = iter(known)
    monkeypatch.setattr(TransformerNPHarness, "_loss_and_error", lambda *arguments: next(remaining))
    expected = measure.expected(Shape(*shape))
    assert list(remaining) == []
    assert expected == Expected(0.0, harness.FACTOR * 1.0)


@pytest.mark.parametrize(
    ("shape", "total"),
    [
        ((64, 500, 256), "2.66e+13"),
        ((10_000, 1_000, 1), "1.057e+13"),
        ((200_000, 5_000, 1), "3.274e+15"),
    ],
    ids=["M64-N500", "M10000-N1000", "M200000-N5000"],
)
def test_operations_are_those_of_the_specification(shape, total):
    counted = operations(TransformerNPConfig(), Shape(*shape))
    digits = total.index("e") - 2
    assert f"{counted['step']:.{digits}e}" == total
    assert counted["step"] == counted["fwd"] + counted["bwd"]


@pytest.mark.parametrize(
    ("wall", "steps"), [(12_000.0, 2), (4_000.0, 3), (1_000.0, 6), (1.0, 30)], ids=str
)
def test_number_of_steps_adapts_to_their_time(monkeypatch, wall, steps):
    taken = []

    def timed(self):
        taken.append(Taken(wall, [wall / 4.0] * 4, 0.0))
        return taken[-1]

    monkeypatch.setattr(Step, "timed", timed)
    sampler = type("Sampler", (), {"device": torch.device("cpu")})
    measured = Step(None, sampler, 1, None, None).measure(6.0, 1.5, "flash")
    assert measured.steps == steps
    # One more than those that are timed, but for a step that is as long as all of them may be.
    assert len(taken) == (2 if wall == 12_000.0 else steps + 1)
    assert measured.step == Time(wall, wall, wall)
    assert (measured.loss, measured.attention, measured.memory_mib) == (1.5, "flash", None)


@pytest.mark.parametrize(
    ("wall", "replays"), [(12_000.0, 2), (4_000.0, 10), (200.0, 30), (1.0, 100)], ids=str
)
def test_number_of_replays_adapts_to_their_time(monkeypatch, wall, replays):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(Replayed, "__init__", lambda self, step: None)
    monkeypatch.setattr(Replayed, "timed", lambda self: Taken(wall, [], 0.0))
    step = SimpleNamespace(device=torch.device("cpu"))
    measured = Replayed.measured(step, 6.0, 1.5, "flash")
    assert measured == Measurement(1.5, "flash", {}, Time(wall, wall, wall), replays, None)


def test_result_files_are_the_testkits():
    assert COLUMNS == testkit_report.COLUMNS
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert environment_name(device) == testkit_bench.environment_name()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "64"], "a shape is M,N,B such as 64,500,64; got '64'"),
        (["--shape", "64,500,0"], "M, N and B must be at least 1; got '64,500,0'"),
        (["--provider", "sdpa,jax"], "provider must be of sdpa-unpruned, .*; got 'sdpa,jax'"),
        (["--sdpa", "fa4"], "sdpa must be of auto, .*; got 'fa4'"),
        (["--preset", "huge"], "'huge' is not one of"),
        (["--device", "quantum"], "--device must be cpu, cuda or cuda:N; got 'quantum'"),
        (["--device", "meta"], "--device must be cpu, cuda or cuda:N; got 'meta'"),
        (["--device", "mps"], "--device must be cpu, cuda or cuda:N; got 'mps'"),
    ],
    ids=flags_of,
)
def test_bad_options_get_one_clear_sentence(arguments, message):
    assert_refused(run(*arguments), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_missing_gpu_is_said():
    assert_refused(run(device="cuda"), "--device cuda needs a CUDA device, and torch sees none")


@pytest.mark.gpu
def test_gpu_that_is_not_there_is_said_in_one_sentence():
    assert_refused(
        run(device="cuda:99"), "wanted a --device that torch can use here; got cuda:99: "
    )


@pytest.mark.gpu
def test_every_provider_is_measured_on_the_gpu(tmp_path):
    result = run("--out", tmp_path, device="cuda", shape="160,6,2")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    here = {name for name in PROVIDER_NAMES if Provider(name).absent(CUDA, "none") is None}
    assert {row["provider"].partition(" (")[0] for row in rows} == here
    assert {row["timing"] for row in rows} == {"event", "wall", "graph"}
    assert {(row["provider"], row["pass"]) for row in rows if row["timing"] == "graph"} == {
        ("fusewright-captured", "step")
    }
    assert all(float(row["mem_mib"]) > 0.0 for row in rows)


@pytest.mark.gpu
def test_replayed_steps_draw_and_learn_what_eager_ones_do():
    """The optimizer is one whose steps have the same bits, and the data is other data each time."""
    config = TransformerNPConfig(width=32, layers=2, heads=2, feed_forward_width=85)
    measure = TransformerNPHarness(config, torch.device("cuda"), 0.0, False, None, None)
    (provider,) = chosen_providers("fusewright-captured", "auto")
    eager, captured = (measure.step(Shape(8, 6, 2), provider) for _ in range(2))
    expected = [float(eager.run()) for _ in range(WARM_UP_STEPS + 5)][WARM_UP_STEPS:]
    replayed = Replayed(captured)
    assert [replayed.timed().loss for _ in range(5)] == expected
    assert len(set(expected)) == 5
