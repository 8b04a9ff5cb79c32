"""What holds of the benches of both language models."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.bench import hybrid, titan_mac
from fusewright_models.bench.text import Text, TextShape
from fusewright_models.models.hybrid import HYBRID
from fusewright_models.models.titan_mac import TITAN_MAC

from .commands import assert_refused, bench_of, flags_of, rows_of

pytestmark = pytest.mark.usefixtures("without_collections")

BENCHES = {"titan-mac": titan_mac, "hybrid": hybrid}
HARNESSES = {
    "titan-mac": (titan_mac.TitanMACHarness, TITAN_MAC["tiny"]),
    "hybrid": (hybrid.HybridHarness, HYBRID["tiny"]),
}
every_model = pytest.mark.parametrize("model", BENCHES)


@every_model
def test_wrong_loss_of_ours_is_not_timed(tmp_path, monkeypatch, model):
    wrong = lambda model, tokens: model.loss(tokens) + 0.5  # noqa: E731
    monkeypatch.setattr(BENCHES[model], "our_loss", wrong)
    result = bench_of(model, "--provider", "fusewright", "--out", tmp_path)
    assert result.exit_code == 1
    assert "is not within" in result.output
    assert list(tmp_path.iterdir()) == []


@every_model
def test_allowance_of_bf16_is_what_a_wrong_loss_exceeds(model):
    """A model that cannot remember errs by more than rounding does."""
    kind, config = HARNESSES[model]
    expected = kind(config, torch.device("cpu"), 0.0, True, None, None).expected(TextShape(2, 40))
    assert 0.0 < expected.allowed < 0.01 * expected.loss
    assert expected.complaint(expected.loss) is None
    assert expected.complaint(1.01 * expected.loss)
    assert expected.complaint(float("nan"))


def test_every_step_reads_the_same_tokens():
    text = Text(11, 5, torch.device("cpu"))
    tokens = text.sample(3)
    assert tokens.shape == (3, 6)
    assert tokens is text.sample(3)
    assert 0 <= tokens.min() <= tokens.max() < 11


BAD_OPTIONS = [
    (["--shape", "64"], "a shape is B,T such as 4,4096; got '64'"),
    (["--shape", "4,0"], "B and T must be at least 1; got '4,0'"),
    (["--provider", "jax"], "provider must be of fusewright, .*; got 'jax'"),
    (["--preset", "huge"], "preset must be of tiny, .*; got 'huge'"),
    (["--device", "quantum"], "--device must be cpu, cuda or cuda:N; got 'quantum'"),
]


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        *((model, *bad) for model in BENCHES for bad in BAD_OPTIONS),
        ("titan-mac", ["--variant", "mad"], "'mad' is not one of"),
        ("hybrid", ["--shape", "4,1"], "T must be at least 2, for a token after next; got 1"),
        ("hybrid", ["--depths", "8,x"], "depths are numbers of layers such as 8,16,32; got '8,x'"),
        ("hybrid", ["--depths", "8,0"], "depths must be at least 1; got '8,0'"),
    ],
    ids=flags_of,
)
def test_bad_options_get_one_clear_sentence(model, arguments, message):
    assert_refused(bench_of(model, *arguments), message)


@pytest.mark.gpu
@every_model
def test_eager_steps_and_replayed_ones_are_measured_on_the_gpu(tmp_path, model):
    arguments = ("--provider", "fusewright", "--out", tmp_path)
    result = bench_of(model, *arguments, device="cuda", shape="2,200")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    assert [row["timing"] for row in rows] == ["wall", "graph"]
    assert all(float(row["mem_mib"]) > 0.0 for row in rows)
