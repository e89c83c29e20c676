"""Images from weights that others published, by one command: a file of yours, and what is known of it.

    python -m image_diffusion.published --config config/published/dit_xl2_imagenet256.yaml \\
        --read DiT-XL-2-256x256.pt --output results/dit

Nothing is downloaded. Writes the weights folder `train`, from which a training may start too (train.init_from), and the
folder `samples`, as the stage sample does.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from image_diffusion import sample
from image_diffusion.core import command
from image_diffusion.core.config import Config, dump, load, to_yaml
from image_diffusion.core.files import sha256_file, write_text
from image_diffusion.export import read_foreign
from image_diffusion.metrics.cited import Cited
from image_diffusion.systems.diffusion.sampling import SampleConfig


class Published(Config):
    """A checkpoint that others published."""

    file: str
    """Its name."""
    what: str
    """What it is of, and from which paper."""
    source: str
    """The page of its authors."""
    licence: str
    """What they allow."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Of the file, where its authors give it."""
    codec: str | None = None
    """The autoencoder of its latents, where it works on any: a folder or a name on the Hugging Face Hub."""
    experiment: str | None = None
    """The experiment file that describes what the file does not tell, as --experiment of export does: its path from
    here."""
    cited: tuple[Cited, ...] = ()
    """What its authors measured of it, and what is different where its images are made here."""
    sample: SampleConfig
    """How images are made with it."""


def read_published(config: Path, path: Path, codec: str | None, folder: Path) -> Published:
    """Write a file as a weights folder, once it is the one that is described.

    codec: in place of the one that it names. Raises ValueError for another file.
    """
    known = load(Published, config)
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Get {known.file} from {known.source}; nothing is downloaded here.")
    if path.name != known.file:
        raise ValueError(f"{config} describes {known.file}, but --read is {path}. Name the one that it describes.")
    if known.sha256 is not None and sha256_file(path) != known.sha256:
        raise ValueError(f"{path} is damaged, or another file: its sha256 is not {known.sha256}. Copy it again.")
    described = config.parent / known.experiment if known.experiment is not None else None
    read_foreign(path, codec or known.codec or "", described, folder)
    return known


def main() -> None:
    parser = command.Parser(prog="python -m image_diffusion.published", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="what is known of the file: config/published/….yaml")
    parser.add_argument("--read", type=Path, required=True, help="the file itself")
    parser.add_argument("--codec", help="the autoencoder of its latents: a folder, where the Hub is not at hand")
    parser.add_argument("--num-samples", type=int, help="images to make (as many as the configuration says)")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    arguments = parser.parse_args()

    output: Path = arguments.output
    known = read_published(arguments.config, arguments.read, arguments.codec, output / "train")
    print(f"published: {known.what}. Licence: {known.licence}", flush=True)
    for each in known.cited:
        print(f"published: {each.metric} {each.value:g} ({each.source}). {' '.join(each.differences)}".rstrip())
    chosen = {} if arguments.num_samples is None else {"num_samples": arguments.num_samples}
    settings = output / "config" / "sample.yaml"
    write_text(settings, to_yaml({"sample": dump(known.sample) | chosen}))
    given = ["--config", settings, "--weights", output / "train" / "weights.safetensors"]
    sample.main([str(each) for each in (*given, "--output", output / "samples" / "samples.npz")])


if __name__ == "__main__":
    command.run(main)
