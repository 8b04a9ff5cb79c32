"""A trained TransformerNP from where it was left: the folder of a run, or one of
``save_pretrained``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ..choices import Backend
from ..cli.commands import read_run
from ..cli.transformer_np import TransformerNPRun
from ..cli.weights import load_model
from ..data.columns import COLUMNS, Columns
from ..models.published import name_of, optional_file_of
from ..models.transformer_np import TransformerNP
from ..training import RunFolder

# What `fusewright_models.studies.pretraining` has left: a network for tables of up to ten columns.
PRETRAINED = Path(__file__).parents[1] / "pretrained" / "regressor"


def load_trained(
    place: Path | str, *, device: torch.device | str = "cpu", backend: Backend = "auto"
) -> tuple[TransformerNP, Columns | None]:
    """The model, in evaluation mode, and the columns that it was trained on, if those had names.

    No random numbers are drawn from torch's own generator.

    Args:
        place: folder of a run, of which the newest checkpoint is read; or folder, or name of a
            repository of the Hugging Face hub, with what ``save_pretrained`` or
            ``fusewright-train export`` wrote.
        device: where the model will lie.
        backend: of the model.

    Raises:
        OSError: there is none.
        ValueError: it holds another model, or one of several outputs, or is damaged.
    """
    folder = RunFolder(place)
    with torch.random.fork_rng(devices=[]):
        if folder.holds_a_run and folder.read_config().get("model") != name_of(TransformerNP):
            run = replace(read_run(TransformerNPRun, folder), device="cpu", backend=backend)
            model = run.built(run.x_width)
            load_model(model, folder)
        else:
            model = TransformerNP.from_pretrained(place, backend=backend)
    file = optional_file_of(str(place), COLUMNS)
    columns = None if file is None else Columns.read(file)
    if columns is not None and len(columns.inputs) != model.config.x_width:
        raise ValueError(
            f"wanted the {model.config.x_width} inputs of the model in {COLUMNS} of {place}; "
            f"got {len(columns.inputs)}"
        )
    if model.config.y_width != 1:
        raise ValueError(
            f"wanted a model of one output in {place}; got one of {model.config.y_width}"
        )
    return model.to(device), columns
