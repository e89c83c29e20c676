"""Find the files of a trained experiment for the command `sample`, by the name that a user gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from image_diffusion.core.config.errors import nearest
from image_diffusion.workflow.inputs import WEIGHTS, Files
from image_diffusion.workflow.plans import Plans, plan_file, read_plan, used_weights


@dataclass(frozen=True)
class TrainedFiles:
    """Files for `sample`; None for files that the experiment does not need or that a folder of weights lacks.

    name: for display. small_images: images that sampling is conditioned on. embeddings: embeddings that images are
    sampled from. crop: configuration of the cropping of its data set."""

    name: str
    weights: Path
    config: Path | None = None
    codec_weights: Path | None = None
    small_images: Path | None = None
    embeddings: tuple[Path, ...] | None = None
    crop: Path | None = None


def find_trained(named: str, results: Path) -> TrainedFiles:
    """Find the files of a trained experiment by its name, its folder, or a folder of weights.

    results: the folder of all results. Raises ValueError if no weights exist.
    """
    folders = (results / named, Path(named))
    for folder in folders:
        if (folder / "train" / WEIGHTS).is_file():
            return _of_experiment(folder)
    if (folders[1] / WEIGHTS).is_file():
        return TrainedFiles(folders[1].resolve().name, folders[1] / WEIGHTS)
    trained = sorted(path.parts[-3] for path in results.glob(f"*/train/{WEIGHTS}"))
    close = nearest(named, trained)
    advice = f" Did you mean {close}?" if close else f" Trained: {', '.join(trained)}." if trained else ""
    raise ValueError(
        f"'{named}' is no trained experiment of {results} and no folder that holds {WEIGHTS}.{advice} Train it, or "
        f"name another one."
    )


def _of_experiment(folder: Path) -> TrainedFiles:
    name, results = folder.resolve().name, folder.parent
    weights, config = used_weights(folder) / WEIGHTS, folder / "config" / "sample.yaml"
    if not weights.is_file():
        raise ValueError(f"{weights} does not exist, as no step is chosen yet. Run snakemake --cores all {name} first.")
    sample_config = config if config.is_file() else None
    if not plan_file(results, name).is_file():
        return TrainedFiles(name, weights, sample_config)
    plan = read_plan(plan_file(results, name))
    files = Files(str(results), Plans({name: plan}))
    crop = Path(plan.configs["crop"]) if "crop" in plan.configs else None
    options = files.options("codec", "small_images", "embeddings").values()
    codec, small, embeddings = (tuple(map(Path, option({"experiment": name})[1:])) for option in options)
    return TrainedFiles(
        name, weights, sample_config, codec[0] if codec else None, small[0] if small else None, embeddings or None, crop
    )
