"""The package takes the workflow along: `image-diffusion init` writes a project that uses it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = ("workflow", "envs", "config")


class WithWorkflow(build_py):
    """Lays the folders of the workflow beside the modules."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in FOLDERS:
            goal = Path(self.build_lib) / "image_diffusion" / "project" / folder
            shutil.copytree(ROOT / folder, goal, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


setup(cmdclass={"build_py": WithWorkflow})
