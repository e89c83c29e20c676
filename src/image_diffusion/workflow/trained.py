"""What lies where of a trained experiment, for a command that a person gives its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from image_diffusion.core.mistakes import nearest
from image_diffusion.workflow.files import Files
from image_diffusion.workflow.plans import Plans, plan_file, read_plan

_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class TrainedFiles:
    """The files that `sample` takes; None for those that an experiment has no use for, or a weights folder alone lacks.

    name: what to call it. small_images: what it enlarges. embeddings: what its images are made of.
    """

    name: str
    weights: Path
    config: Path | None = None
    codec_weights: Path | None = None
    small_images: Path | None = None
    embeddings: tuple[Path, ...] | None = None


def find_trained(named: str, results: Path) -> TrainedFiles:
    """The files of what a person names: an experiment, its folder, or a folder of weights.

    results: the folder of all results. Raises ValueError where there are no weights.
    """
    folders = (results / named, Path(named))
    for folder in folders:
        if (folder / "train" / _WEIGHTS).is_file():
            return _of_experiment(folder)
    if (folders[1] / _WEIGHTS).is_file():
        return TrainedFiles(folders[1].resolve().name, folders[1] / _WEIGHTS)
    there = sorted(path.parts[-3] for path in results.glob(f"*/train/{_WEIGHTS}"))
    close = nearest(named, there)
    advice = f" Did you mean {close}?" if close else f" Trained: {', '.join(there)}." if there else ""
    raise ValueError(
        f"'{named}' is no trained experiment of {results} and no folder that holds {_WEIGHTS}.{advice} Train it, or "
        f"name another one."
    )


def _of_experiment(folder: Path) -> TrainedFiles:
    name, results = folder.resolve().name, folder.parent
    weights, config = folder / "train" / _WEIGHTS, folder / "config" / "sample.yaml"
    found = config if config.is_file() else None
    if not plan_file(results, name).is_file():
        return TrainedFiles(name, weights, found)
    files, of = Files(str(results), Plans({name: read_plan(plan_file(results, name))})), {"experiment": name}
    codec, small = files.codec_option(of)[1:], files.small_images_option(of)[1:]
    embeddings = tuple(map(Path, files.embeddings_option(of)[1:])) or None
    return TrainedFiles(
        name, weights, found, Path(codec[0]) if codec else None, Path(small[0]) if small else None, embeddings
    )
