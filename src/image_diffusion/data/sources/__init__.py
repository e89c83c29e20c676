"""Where images come from. One kind of source, one file; its name in `Source`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.data.sources.digits import Digits
from image_diffusion.data.sources.edm2_latents import Edm2Latents
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.data.sources.fastdit_latents import FastDiTLatents
from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.huggingface import HuggingFace
from image_diffusion.data.sources.lightningdit_latents import LightningDiTLatents
from image_diffusion.data.sources.lmdb_database import Lmdb
from image_diffusion.data.sources.painted import PaintedDigits
from image_diffusion.data.sources.parquet import Parquet
from image_diffusion.data.sources.path_list import PathList
from image_diffusion.data.sources.table import Table
from image_diffusion.data.sources.tar_stream import TarStream
from image_diffusion.data.sources.torchvision_set import TorchvisionSet
from image_diffusion.data.sources.webdataset import Webdataset
from image_diffusion.data.sources.zip_archive import ZipArchive

Source = Annotated[
    Folder
    | Digits
    | PaintedDigits
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
