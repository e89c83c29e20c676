"""Sources of images. Related sources share a file; `Source` is the union of all source classes."""

from typing import Annotated

from pydantic import Field

from image_diffusion.data.sources.archives import Lmdb, ZipArchive
from image_diffusion.data.sources.arrow import HuggingFace, Parquet
from image_diffusion.data.sources.drawn_cells import DrawnCells
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.latents import Edm2Latents, FastDiTLatents, LightningDiTLatents
from image_diffusion.data.sources.scikit_digits import Digits, PaintedDigits, SlantedDigits
from image_diffusion.data.sources.table import PathList, Table
from image_diffusion.data.sources.tars import TarStream, Webdataset
from image_diffusion.data.sources.torchvision import TorchvisionSet

Source = Annotated[
    Folder
    | Digits
    | PaintedDigits
    | DrawnCells
    | SlantedDigits
    | Table
    | PathList
    | Webdataset
    | TarStream
    | Parquet
    | HuggingFace
    | ZipArchive
    | Lmdb
    | TorchvisionSet
    | Embeddings
    | Edm2Latents
    | LightningDiTLatents
    | FastDiTLatents,
    Field(discriminator="type"),
]
