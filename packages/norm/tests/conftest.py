"""What the tests of this package share."""

from __future__ import annotations

import pytest
import torch

from .operations import ROW_NORMS, NormOp

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(params=ROW_NORMS)
def op(request: pytest.FixtureRequest) -> NormOp:
    """Each norm of rows; a module that is about one says so by its parametrization."""
    return ROW_NORMS[request.param]


@pytest.fixture
def few_programs(device: str, fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, let one program add up many columns: it takes milliseconds a program,
    however little that does.
    """
    if device == "cpu":
        from fusewright.norm.row_norm import launch_backward

        add_parts = launch_backward.ADD_PARTS._replace(block_parts=4, block_cols=4096)
        small = launch_backward.BACKWARD_SMALL._replace(part_cols=512)
        monkeypatch.setattr(launch_backward, "ADD_PARTS", add_parts)
        monkeypatch.setattr(launch_backward, "BACKWARD_SMALL", small)


@pytest.fixture(params=["small", "rows", "wide"])
def scheme(
    request: pytest.FixtureRequest, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Send tensors of every size to the kernels of one scheme: those of small tensors, of rows that
    fit in registers, and of wide rows with several blocks and shares.
    """
    from fusewright.norm.row_norm import launch, launch_backward

    if request.param != "small":
        monkeypatch.setattr(launch_backward, "fits_small", lambda rows, cols: False)
    if request.param == "wide":
        for table in ("FORWARD", "FORWARD_ADD", "FORWARD_LAYER"):
            monkeypatch.setattr(launch, table, ())
        monkeypatch.setattr(launch_backward, "BACKWARD", ())
        forward = launch.FORWARD_WIDE._replace(block_cols=64, num_warps=2)
        backward = launch_backward.BACKWARD_WIDE._replace(
            block_cols=64, num_warps=2, parts=3, block_rows=4, part_cols=32
        )
        monkeypatch.setattr(launch, "FORWARD_WIDE", forward)
        monkeypatch.setattr(launch_backward, "BACKWARD_WIDE", backward)
    return request.param
