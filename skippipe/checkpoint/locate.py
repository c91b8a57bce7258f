"""Where a model lies that a command is given: without torch, so that a wrong path is reported at once."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from skippipe.checkpoint.format import MANIFEST, Checkpoints, hold
from skippipe.errors import UserError
from skippipe.json_fields import exists
from skippipe.model.model_files import CONFIG, INDEX
from skippipe.runs.tail import model_run_id, run_id_of

BUILT_IN = ("austen",)  # models that come with the package


def built_in(checkpoint: Path) -> Path:
    """The folder of a model that comes with the package, if this is its name and no folder has that name; else as it
    is."""
    if str(checkpoint) in BUILT_IN and not exists(checkpoint):
        return Path(str(files("skippipe").joinpath("resources", str(checkpoint))))
    return checkpoint


def find_checkpoint(checkpoint: Path) -> Path:
    """A checkpoint or a Hugging Face folder itself; of a run's output folder, its newest checkpoint or its model (see
    `model_instead`).

    UserError if there is none.
    """
    checkpoint = built_in(checkpoint)
    if not exists(checkpoint):
        raise UserError(f"{checkpoint}: no such folder; '{BUILT_IN[0]}' is a model that is built in")
    newest = None if model_instead(checkpoint) else Checkpoints.of_run(checkpoint).hold_newest()
    for place in (checkpoint, *([newest] if newest else []), checkpoint / "model"):
        if (place / MANIFEST).is_file() or (place / CONFIG).is_file():
            other = place != checkpoint and (place / INDEX).is_file()
            if other and run_id_of(checkpoint) not in (None, model_run_id(place)):
                raise UserError(
                    f"{place}: is the model of another run than {checkpoint}; name {place} if it is what you want"
                )
            hold(place)
            return place
    raise UserError(
        f"{checkpoint}: neither a checkpoint, nor a run's output folder, nor a Hugging Face folder with a config.json"
    )


def model_instead(run: Path) -> Path | None:
    """The model in a run's output folder, if the only checkpoint has what the run began with: one process makes no
    others, and neither does checkpoint.every = 0. None: there is a later one, or no such model."""
    found, model = Checkpoints.of_run(run).complete(), run / "model"
    if not found or int(found[0].name):
        return None
    ours = (model / INDEX).is_file() and run_id_of(run) in (None, model_run_id(model))
    return model if ours else None


def newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run, with a warning for every one of another run that is ignored. UserError if there
    is none, or none but that of the start where there is a model that was trained."""
    checkpoints = Checkpoints.of_run(run)
    checkpoints.warn_of_others()
    newest = checkpoints.hold_newest()
    if newest is None and (built_in(run) / CONFIG).is_file():
        where = f" ({built_in(run)})" if built_in(run) != run else ""
        raise UserError(
            f"{run}: is a Hugging Face folder already{where}, like those that export makes: use it as it is"
        )
    if newest is None:
        raise UserError(f"{run}: neither a checkpoint nor the output folder of a run that has one")
    if model := model_instead(run):
        raise UserError(
            f"{newest}: is what the run began with, and there is no later checkpoint; what it has trained is in "
            f"{model}, a folder like those that export makes"
        )
    return newest


def locate_checkpoint(checkpoint: Path) -> Path:
    """As `find_checkpoint`, with a warning for every checkpoint of another run that is ignored."""
    place = find_checkpoint(checkpoint)
    if place != built_in(checkpoint):
        Checkpoints.of_run(checkpoint).warn_of_others()
    return place
