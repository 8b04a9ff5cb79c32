"""Options of a command from the fields of a run: what config.json holds and --resume takes up.

A field's annotation says what typer is to know of its option; without the option, the run's preset
or the field's own default decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, get_annotations
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from fusewright.attention import Backend

from ..models.checkpointing import Checkpointing
from ..training import OptimizerName, Parallel, Precision

LARGEST_SEED = 2**63 - 1
# Options that say the same of every model.
PeakRate = Annotated[
    float,
    typer.Option(
        help="Peak rate: warm-up over a twentieth, then a cosine. Default: the preset's; 0.1 of "
        "the optimizer learned."
    ),
]
OptimizerChoice = Annotated[OptimizerName, typer.Option(help="Default: adamw.")]
OptimizerWeights = Annotated[
    str | None,
    typer.Option(help="Of the optimizer learned: a safetensors file. Default: what it ships."),
]
CaptureChoice = Annotated[
    bool | None,
    typer.Option(help="Replay steps from CUDA graphs. Default: on cuda, where that can be done."),
]
PrecisionChoice = Annotated[
    Precision, typer.Option(help="bf16 is autocast over fp32 parameters. Default: bf16 on cuda.")
]
Device = Annotated[str, typer.Option(help="Default: cuda where there is one.")]
Compile = Annotated[bool, typer.Option(help="Default: --no-compile.")]
BackendChoice = Annotated[
    Backend, typer.Option(help="Triton kernels or plain torch. Default: auto.")
]
CheckpointingChoice = Annotated[
    Checkpointing,
    typer.Option(
        help="Compute again in the backward pass, rather than keep: nothing, blocks, or blocks but "
        "for their attention. Default: none."
    ),
]
ParallelChoice = Annotated[
    Parallel | None,
    typer.Option(
        help="How the processes of torchrun train together: each with the whole model, or with a "
        "part of all parameters, or each host with the whole. Default: ddp."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]
LogEvery = Annotated[int, typer.Option(min=1, help="Steps between log points. Default: 10.")]
EvaluateEvery = Annotated[int, typer.Option(min=1, help="Steps between evaluations.")]
CheckpointEvery = Annotated[
    str | None,
    typer.Option(
        help="Steps between checkpoints, such as 500, or minutes, such as 10m. Default: one with "
        "every evaluation."
    ),
]
Keep = Annotated[int, typer.Option(min=1, help="How many of the last checkpoints. Default: 2.")]


def takes(kind: type, **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command of an option for each field of a run's dataclass, its own fields before those that
    it inherits, and of ``more``; it is called with those that are given.
    """
    parameters = [*options_of(kind), *(_option(name, x) for name, x in more.items())]

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def given(**flags: Any) -> None:
            command(**{name: value for name, value in flags.items() if value is not None})

        given.__annotations__ = {each.name: each.annotation for each in parameters}
        given.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return given

    return taking


def options_of(kind: type) -> Iterator[Parameter]:
    """What typer makes an option of, for each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    known = {field.name for field in fields(kind)}
    names = (name for each in kind.__mro__ for name in get_annotations(each))
    return (_option(name, hints[name]) for name in dict.fromkeys(names) if name in known)


def _option(name: str, hint: Any) -> Parameter:
    wanted, *told = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    annotation = Annotated[wanted | None, *told]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def check_fields(run: Any) -> None:
    """Refuse what a hand that edited config.json may have put into a run's dataclass.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field is none of its literals, or ``seed`` is out of range.
    """
    kinds = get_type_hints(type(run))
    for field in fields(run):
        _check_field(field.name, getattr(run, field.name), kinds[field.name])
    if not 0 <= run.seed <= LARGEST_SEED:
        raise ValueError(f"seed must be 0 to {LARGEST_SEED}; got {run.seed}")


def _check_field(name: str, value: Any, kind: Any) -> None:
    if value is None and NoneType in get_args(kind):
        return
    # Beside None a literal is one of a union's.
    literals = [each for each in (kind, *get_args(kind)) if get_origin(each) is Literal]
    if literals:
        if value not in get_args(literals[0]):
            raise ValueError(f"{name} must be one of {get_args(literals[0])}; got {value!r}")
        return
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    # JSON writes 1.0 as 1, too; True is an int to Python.
    wanted = (float, int) if kind is float else kinds
    if type(value) not in wanted:
        names = " or ".join("None" if each is NoneType else each.__name__ for each in kinds)
        raise TypeError(f"{name} must be {names}; got {value!r}")
