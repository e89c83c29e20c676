"""The package takes the workflow along: `image-diffusion init` writes a project that uses it. And where there is a C
compiler, the resize of crops, the random numbers of a CPU and the look at a folder are compiled; they need no headers
of Python's, and one build serves every version."""

import importlib.util
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = ("workflow", "envs", "config")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "experiment.schema.json", "study.schema.json")  # generated


class WithWorkflow(build_py):
    """Lays the folders of the workflow beside the modules."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in FOLDERS:
            goal = Path(self.build_lib) / "image_diffusion" / "project" / folder
            shutil.copytree(ROOT / folder, goal, ignore=LEFT_OUT, dirs_exist_ok=True)


class Library(build_ext):
    """Gives what is compiled a name by which Python does not take it for a module, which it is not, and a seal by which
    damage is seen."""

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        spec = importlib.util.spec_from_file_location("compiled", ROOT / "src/image_diffusion/core/native.py")
        compiled = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiled)
        compiled.seal(Path(self.get_ext_fullpath(ext.name)), ROOT / ext.sources[0])

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.compiled"


class ForEveryPython(bdist_wheel):
    """Names the wheel after its platform alone, since no extension depends on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def library(name: str) -> Extension:
    """A file of C beside the modules. Sums that may not wrap are vectorized; products that are not contracted give the
    bits that Pillow and PyTorch give."""
    options = ["-O3", "-fno-wrapv", "-ffp-contract=off"]
    source = f"src/image_diffusion/{name}.c"
    dotted = f"image_diffusion.{name.replace('/', '.')}"
    return Extension(dotted, [source], extra_compile_args=options, libraries=["m"], optional=True)


LIBRARIES = [library("data/crop/resize"), library("core/random/philox"), library("data/sources/entries")]
commands = {"build_py": WithWorkflow, "build_ext": Library, "bdist_wheel": ForEveryPython}
setup(cmdclass=commands, ext_modules=LIBRARIES)
