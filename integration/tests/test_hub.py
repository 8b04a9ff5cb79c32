"""Packages as the kernels library loads them: beside what is installed, and in models of
transformers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from fusewright_testkit import Yardstick
from fusewright_testkit.pages import python_blocks
from torch import Tensor

from .causal_models import (
    BF16,
    F32,
    F64,
    LENGTH,
    ROWS,
    VOCABULARY,
    function_of,
    made,
    transformers,
    yardstick_of,
)

kernels = pytest.importorskip("kernels", reason="kernels, of nox -s transformers, is not installed")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# Wheels are tested without the sources beside them.
pytestmark = [
    pytest.mark.skipif(not PACKAGES, reason="packages/ is not beside these tests"),
    # Of each module that is marked and has no layer of ours.
    pytest.mark.filterwarnings("ignore:\\nNo kernel mapping found"),
]
TAKES_KERNELS = transformers.utils.is_kernels_available()
taken = pytest.mark.skipif(
    not TAKES_KERNELS, reason=f"this transformers takes no kernels {kernels.__version__}"
)
OWNER = "fusewright"


@pytest.fixture(scope="session")
def repositories(tmp_path_factory) -> Path:
    """A folder with one of each package."""
    folder = tmp_path_factory.mktemp("hub")
    for name in PACKAGES:
        command = [sys.executable, str(ROOT / "ci/hub.py"), name, str(folder / name)]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def tensors_of(code: str, source: Path) -> dict[str, Tensor]:
    """What it leaves in its names, from the same random numbers; a module's are its parameters."""
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(code, str(source), "exec"), names)
    found = {name: x for name, x in names.items() if isinstance(x, Tensor)}
    for name, module in names.items():
        if isinstance(module, torch.nn.Module):
            for key, p in module.named_parameters(name):
                found[key] = p
                if p.grad is not None:
                    found[f"{key}.grad"] = p.grad
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_build_and_installed_package_give_the_same_bits_in_one_process(package, repositories):
    """The first code of its README, in turn."""
    installed = import_module(f"fusewright.{package.replace('-', '_')}")
    build = kernels.get_local_kernel(repositories / package)
    assert set(installed.__all__) <= set(build.__all__)
    assert build.__version__ == installed.__version__
    readme = ROOT / f"packages/{package}/README.md"
    code = python_blocks(readme.read_text())[0]
    changed = code.replace(f"from {installed.__name__} import", f"from {build.__name__} import")
    assert changed != code
    expected = tensors_of(code, readme)
    for source, wanted in ((changed, expected), (code, expected)):
        found = tensors_of(source, readme)
        assert found
        assert found.keys() == wanted.keys()
        for name, x in found.items():
            assert torch.equal(x, wanted[name]), name


@pytest.mark.parametrize("package", PACKAGES)
def test_ops_are_in_a_namespace_of_the_build(package, repositories):
    build = kernels.get_local_kernel(repositories / package)
    namespace = import_module(f"{build.__name__}._core.registration").NAMESPACE
    assert namespace == build.__name__
    # The library asks torch what it was built for, not what there is.
    backend = "cuda" if torch.version.cuda else "cpu"
    assert namespace.startswith(f"_fusewright_{package.replace('-', '_')}_{backend}_")
    operations = import_module(f"{build.__name__}._core.registration").OPS
    assert all(op.overload.namespace == namespace for op in operations)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_kernels_of_the_build_give_the_same_bits_and_gradients(backend, repositories):
    from fusewright import norm

    build = kernels.get_local_kernel(repositories / "norm")
    inputs = [torch.randn(5, 24, dtype=BF16, requires_grad=True), torch.randn(24, dtype=BF16)]
    results = []
    for each in (norm, build, norm):
        y = each.rms_norm(*inputs, backend=backend)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), inputs[:1])])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


def test_copy_of_a_build_is_that_build(repositories, tmp_path):
    build = kernels.get_local_kernel(repositories / "norm")
    copied = shutil.copytree(repositories / "norm", tmp_path / "copy")
    assert kernels.get_local_kernel(copied).rms_norm is build.rms_norm


def test_builds_that_differ_stand_beside_one_another(repositories, tmp_path):
    """As of two releases."""
    source = shutil.copytree(ROOT / "packages", tmp_path / "packages", symlinks=True) / "norm"
    shutil.copytree(ROOT / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("tests"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (source / "src/fusewright/norm/common/later.py").write_text('"""More."""\n')
    command = [sys.executable, str(tmp_path / "ci/hub.py"), "norm", str(tmp_path / "norm")]
    subprocess.run(command, check=True, cwd=tmp_path)
    first, second = map(kernels.get_local_kernel, (repositories / "norm", tmp_path / "norm"))
    assert first.__name__ != second.__name__
    x = torch.randn(3, 16)
    assert torch.equal(first.rms_norm(x), second.rms_norm(x))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("package", PACKAGES)
def test_digest_is_that_of_the_files(package, backend, repositories):
    library = pytest.importorskip("kernels._rust", reason="kernels before 0.17 reads no digests")
    folder = repositories / package / f"build/torch-{backend}"
    told = kernels.Metadata.read_from_file(folder / "metadata.json")
    assert told.name.python_name == f"fusewright_{package.replace('-', '_')}"
    assert str(told.backend.backend_type).lower() == backend
    told.digest.validate(library.Digest.hash_variant(told.digest.algorithm, folder))


# By the name that a class or function is marked with, which layer of which package.
LAYERS = {
    "RMSNorm": ("norm", "RMSNorm"),
    "RMSNormZeroCentered": ("norm", "RMSNormZeroCentered"),
    "SwiGLUMLP": ("feed-forward", "SwiGLUMLP"),
    "rotary_pos_emb": ("attention", "RotaryPosEmb"),
}


def mapping(repositories: Path, device: str) -> dict:
    return {
        name: {device: kernels.LocalLayerRepository(repositories / package, layer_name=layer)}
        for name, (package, layer) in LAYERS.items()
    }


@contextmanager
def kernelized(model, repositories, mode):
    """With our layers; functions, which all models share, are afterwards as they were."""
    device = model.device.type
    with kernels.use_kernel_mapping(mapping(repositories, device), inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device=device)
    try:
        yield
    finally:
        with kernels.use_kernel_mapping({}, inherit_mapping=False):
            kernels.kernelize(model, mode=mode, device=device)


@pytest.fixture
def marked(monkeypatch):
    """Marks the classes of a family that transformers does not."""

    def mark(family: str) -> None:
        source = import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
        centered = "RMSNormZeroCentered" if family == "Gemma" else "RMSNorm"
        names = {"RMSNorm": centered}
        if family != "Gemma":
            names["MLP"] = "SwiGLUMLP"
        for name, layer in names.items():
            kind = getattr(source, f"{family}{name}")
            for attribute in ("kernel_layer_name", "kernel_condition"):
                monkeypatch.setattr(kind, attribute, None, raising=False)
            kernels.replace_kernel_forward_from_hub(kind, layer)

    return mark


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH))


def replaced(model) -> set[str]:
    """Where the forward passes come from that are no longer those of their classes."""
    functions = [f for m in model.modules() for f in getattr(m, "_kernel_funcs", {}).values()]
    passes = {(type(m).forward, m.forward.__func__) for m in [*model.modules(), *functions]}
    return {found.__qualname__ for own, found in passes if found is not own}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"])
def test_logits_and_gradients_with_our_layers_are_those_of_transformers(
    family, dtype, repositories, marked, tokens
):
    marked(family)
    model = made(family, dtype).train()
    yardstick = yardstick_of(model, input_ids=tokens)
    with kernelized(model, repositories, kernels.Mode.TRAINING):
        norm = "RMSNormZeroCentered" if family == "Gemma" else "RMSNorm"
        ours = {f"{norm}.forward"}
        if family != "Gemma":
            ours.add("SwiGLUMLP.forward")
        if TAKES_KERNELS:
            ours.add("RotaryPosEmb.forward")
        assert replaced(model) == ours
        yardstick.check(function_of(model, input_ids=tokens))


def test_model_with_our_layers_compiles_as_one_graph(
    repositories, marked, tokens, assert_same_but_for_rounding
):
    marked("Llama")
    model = made(dtype=F64)
    with kernelized(model, repositories, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE):
        expected = model(input_ids=tokens).logits
        model.compile(fullgraph=True, backend="aot_eager")
        found = model(input_ids=tokens).logits
    assert_same_but_for_rounding([found], [expected])


def test_network_that_is_not_gated_by_silu_is_refused(repositories, marked, tokens):
    marked("Llama")
    model = made(hidden_act="gelu")
    with (
        kernelized(model, repositories, kernels.Mode.INFERENCE),
        pytest.raises(ValueError, match="the network must be gated by SiLU, got GELUActivation"),
    ):
        model(input_ids=tokens)


def layer(repositories, package: str, name: str):
    return getattr(kernels.get_local_kernel(repositories / package).layers, name)


def test_halves_of_a_tensor_are_gate_and_input(repositories):
    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    forward = layer(repositories, "feed-forward", "SiluAndMul")().forward
    Yardstick(silu_and_mul, [torch.randn(3, 5, 32, dtype=BF16)]).check(forward)


def test_gated_norm_is_that_of_qwen3_next(repositories):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm = Qwen3NextRMSNormGated(16)
    forward = layer(repositories, "norm", "RMSNormGated").forward

    def of(f):
        def call(x, gate, weight):
            norm.weight.data = weight
            return f(norm, x, gate)

        return call

    def exact(norm, x, gate):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * y * torch.nn.functional.silu(gate)

    inputs = [torch.randn(7, 16), torch.randn(7, 16), 1 + 0.1 * torch.randn(16)]
    Yardstick(of(exact), inputs).check(of(forward))


@pytest.fixture
def attending(monkeypatch, repositories):
    """Lets a model attend by our repository, as by one that was downloaded."""
    name = f"{OWNER}/fusewright-attention"
    monkeypatch.setenv("LOCAL_KERNELS", f"{name}={repositories / 'attention'}")

    def attend(model):
        model.set_attn_implementation(name)
        return model

    return attend


@taken
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["all", "window", "padded", "packed"])
def test_attention_of_the_repository_is_that_of_transformers(case, dtype, attending, tokens):
    """Of eager, which is given all masks; beside a cache documents cannot be packed."""
    inputs = {"input_ids": tokens, "use_cache": False}
    if case == "padded":
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][0, :3] = 0
    if case == "packed":
        inputs["input_ids"] = tokens.reshape(1, -1)
        inputs["position_ids"] = torch.arange(LENGTH).repeat(ROWS)[None]
    model = made("Mistral" if case == "window" else "Llama", dtype)
    model.set_attn_implementation("eager")
    yardstick = yardstick_of(Present(model, inputs), **inputs)
    yardstick.check(function_of(Present(attending(model), inputs), **inputs))


class Present(torch.nn.Module):
    """A model's logits, without those of padding, which mean nothing."""

    def __init__(self, model, inputs) -> None:
        super().__init__()
        self.model, self.dtype = model, model.dtype
        mask = inputs.get("attention_mask")
        self.present = None if mask is None else mask.bool()

    def forward(self, **inputs):
        found = self.model(**inputs)
        if self.present is not None:
            found.logits = found.logits[self.present]
        return found


@taken
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_texts_that_are_padded_go_on_by_our_attention_as_before(family, attending, tokens):
    """One new token of each at a time, over what a cache holds."""
    model = made(family, F64)
    inputs = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    inputs["attention_mask"][0, :4] = 0
    options = dict(max_new_tokens=6, do_sample=False)
    expected = model.generate(**inputs, **options)
    assert torch.equal(attending(model).generate(**inputs, **options), expected)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dropout_p": 0.1, "causal": True}, "dropout_p must be 0, got 0.1"),
        ({"softcap": 30.0, "causal": True}, "softcap must be 0, got 30.0"),
        ({"window_size": (3, 3)}, r"attention to a window must be causal, got \(3, 3\)"),
    ],
    ids=["dropout", "cap", "window"],
)
def test_attention_that_is_not_ours_is_refused(asked, said, repositories):
    build = kernels.get_local_kernel(repositories / "attention")
    x = torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match=said):
        build.flash_attn_func(x, x, x, **asked)
    bounds = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match=said if "causal" in asked else "causal"):
        build.flash_attn_varlen_func(*(x[0],) * 3, bounds, bounds, 4, 4, **asked)


def test_queries_that_are_no_last_tokens_are_refused(repositories):
    build = kernels.get_local_kernel(repositories / "attention")
    x, bounds = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    for rows, longest in ((3, 1), (2, 2)):
        with pytest.raises(ValueError, match=r"or the last one of each of 2 documents, got \d"):
            build.flash_attn_varlen_func(x[:rows], x, x, bounds, bounds, longest, 4, causal=True)


def test_every_query_sees_every_key_where_attention_is_not_causal(repositories):
    build = kernels.get_local_kernel(repositories / "attention")
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)

    def attention(*heads):
        heads = [x.transpose(1, 2) for x in heads]
        y = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        return y.transpose(1, 2)

    Yardstick(attention, [q, k, v]).check(build.flash_attn_func)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_layers_on_a_gpu_give_logits_and_gradients_of_transformers(
    family, repositories, marked, tokens
):
    marked(family)
    model, tokens = made(family, BF16, hidden_size=64, head_dim=16).train().cuda(), tokens.cuda()
    yardstick = yardstick_of(model, input_ids=tokens)
    with kernelized(model, repositories, kernels.Mode.TRAINING):
        assert {"RMSNorm.forward", "SwiGLUMLP.forward"} <= replaced(model)
        yardstick.check(function_of(model, input_ids=tokens))


@pytest.mark.gpu
@taken
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_attention_on_a_gpu_is_that_of_transformers(family, attending, tokens):
    inputs = {"input_ids": tokens.cuda(), "use_cache": False}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :3] = 0
    model = made(family, BF16, hidden_size=64, head_dim=16).cuda()
    model.set_attn_implementation("eager")
    yardstick = yardstick_of(Present(model, inputs), **inputs)
    yardstick.check(function_of(Present(attending(model), inputs), **inputs))
