"""Final weights as MLflow models: logged once with all files needed to use them; the best has the alias `best`.

A logged model has a key and is searched for before it is created; its files are sent again until its status is ready.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow.pyfunc
from mlflow.entities import LoggedModelInput, LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.models import Model

import image_diffusion
from image_diffusion.tracking.connection import KEY, Connection, locked, remove_damaged
from image_diffusion.tracking.plan import FinalWeights

if TYPE_CHECKING:
    from image_diffusion.tracking.pyfunc import Usage

BEST = "best"
_VERSIONS = "mlflow.modelVersions"
_LOADER = "image_diffusion_model"
_LOADER_CODE = '''"""Finds the code that this model was logged with."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("image_diffusion.zip")))
from image_diffusion.tracking.pyfunc import _load_pyfunc
'''


class Models:
    """The models of a connection's experiment. Every method raises TrackingError if the store does not respond."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._client = connection, connection.client
        self._naming_errors, self._write = connection.naming_errors, connection.write

    def log(self, weights: FinalWeights) -> str:
        """Return the id of the logged model of some weights, creating it if missing.

        With `mlflow.pyfunc`, a model maps seeds and conditions to images, or images to reconstructions; weights for
        neither are logged as files only, which the tag `pyfunc` states.
        """
        experiment = self._connection.experiment_id

        def create() -> None:
            source = {"mlflow.source.name": "image_diffusion.stages.train", "mlflow.source.type": "JOB"}
            tags = {**weights.tags, **source, KEY: weights.key}
            self._client.create_logged_model(experiment, weights.name, weights.run_id, tags, {}, "diffusion")

        def search() -> list[Any]:
            return list(self._client.search_logged_models([experiment], f"tags.`{KEY}` = '{weights.key}'"))

        def delete(twin: Any) -> None:
            self._client.delete_logged_model(twin.model_id)

        with self._naming_errors():
            model = self._connection.get_or_create(search, create, delete, lambda twin: twin.model_id)
            model_id = str(model.model_id)
            artifacts = self._connection.artifacts(model.artifact_location)
            wrong = remove_damaged(artifacts) if artifacts is not None else []
            if wrong or model.status != LoggedModelStatus.READY:
                self._send_files(model_id, weights)
            if artifacts is not None:
                files = (path for path in artifacts.rglob("*") if path.is_file())
                self._connection.note_sent(artifacts, [str(path.relative_to(artifacts)) for path in files], wrong)
            if model.status != LoggedModelStatus.READY:
                self._write(self._client.finalize_logged_model, model_id, LoggedModelStatus.READY)
            linked = {output.model_id for output in self._client.get_run(weights.run_id).outputs.model_outputs}
            if model_id not in linked:
                self._write(self._client.log_outputs, weights.run_id, [LoggedModelOutput(model_id, weights.step)])
            return model_id

    def record_model_use(self, run_id: str, model_id: str) -> None:
        """Record that a run used a logged model."""
        with self._naming_errors():
            used = {entry.model_id for entry in self._client.get_run(run_id).inputs.model_inputs}
            if model_id not in used:
                self._write(self._client.log_inputs, run_id, models=[LoggedModelInput(model_id)])

    def register(
        self,
        name: str,
        model_id: str,
        run_id: str,
        tags: Mapping[str, str],
        score: float | None,
        about: str,
        about_version: str,
    ) -> None:
        """Make a logged model a version of the registered model `name`, and give the alias `best` to the version with
        the lowest score; a version without a score is never the best. about, about_version: descriptions; an existing
        description is kept."""
        score_tags = {} if score is None else {"score": repr(score)}

        def search() -> list[Any]:
            versions = self._client.search_model_versions(f"name = '{name}'")
            return [version for version in versions if version.tags.get(KEY) == model_id]

        def create() -> None:
            if not self._client.search_registered_models(f"name = '{name}'"):
                try:
                    self._client.create_registered_model(name, description=about)
                except MlflowException as error:  # another process did, or the response to a first request was lost
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
            all_tags = {**tags, **score_tags, KEY: model_id}
            source = f"models:/{model_id}"
            self._client.create_model_version(
                name,
                source,
                run_id,
                all_tags,
                description=about_version,
                model_id=model_id,
                await_creation_for=0,
            )

        def delete(twin: Any) -> None:
            self._client.delete_model_version(name, twin.version)

        with self._naming_errors():
            own = self._connection.get_or_create(search, create, delete, lambda version: int(version.version))
            for key, value in score_tags.items():
                if own.tags.get(key) != value:
                    self._write(self._client.set_model_version_tag, name, own.version, key, value)
            if not own.description:
                self._write(self._client.update_model_version, name, own.version, about_version)
            if not self._client.get_registered_model(name).description:
                self._write(self._client.update_registered_model, name, about)
            self._show_version(model_id, name, str(own.version))
            with locked(self._connection.lock):
                versions = self._client.search_model_versions(f"name = '{name}'")
                scored = [(float(item.tags["score"]), int(item.version)) for item in versions if "score" in item.tags]
                if scored:
                    best = str(min(scored)[1])
                    if str(self._client.get_registered_model(name).aliases.get(BEST)) != best:
                        self._client.set_registered_model_alias(name, BEST, best)

    def _show_version(self, model_id: str, name: str, version: str) -> None:
        """Show the registered version on the page of a logged model."""
        own = {"name": name, "version": version}
        others = json.loads(self._client.get_logged_model(model_id).tags.get(_VERSIONS, "[]"))
        if own not in others:
            self._write(self._client.set_logged_model_tags, model_id, {_VERSIONS: json.dumps([*others, own])})

    def _send_files(self, model_id: str, weights: FinalWeights) -> None:
        """Send the files of a logged model. Files that were sent before are replaced."""
        # Imports PyTorch, which tracking does not need otherwise.
        from image_diffusion.tracking.pyfunc import usage

        usable = None
        try:
            usable = usage(weights.files["model.json"].parent, "embeds/model.json" in weights.files)
        except ValueError as error:  # from another version of this package, or not usable by requests
            served = f"no: {error}"
        else:
            served = "yes" if usable is not None else "no: this system needs more than a request can name"
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            if usable is not None:
                write_pyfunc(folder, model_id, weights, usable)
            for name, path in weights.files.items():
                link = folder / "data" / "model" / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())
            for path in sorted(file for file in folder.rglob("*") if file.is_file()):
                inside = path.parent.relative_to(folder).as_posix()
                self._client.log_model_artifact(model_id, str(path), "" if inside == "." else inside)
        self._write(self._client.set_logged_model_tags, model_id, {"pyfunc": served})


def write_pyfunc(folder: Path, model_id: str, weights: FinalWeights, usable: Usage) -> None:
    """Write an MLflow model, without the files of the weights, to a new folder.

    It includes the package, as a zip, so that the model can be loaded where the package is not installed.
    """
    created = datetime.fromtimestamp(weights.made / 1000, UTC)
    model = Model(
        run_id=weights.run_id,
        utc_time_created=str(created),
        model_uuid=model_id,
        model_id=model_id,
        signature=usable.signature,
    )
    with tempfile.TemporaryDirectory() as temporary:
        (data := Path(temporary) / "model").mkdir()
        (code := Path(temporary) / "code").mkdir()
        (code / f"{_LOADER}.py").write_text(_LOADER_CODE)
        zip_package(code / "image_diffusion.zip")
        with _installed_only():
            mlflow.pyfunc.save_model(
                str(folder),
                loader_module=_LOADER,
                data_path=str(data),
                code_paths=[str(file) for file in sorted(code.iterdir())],
                mlflow_model=model,
                pip_requirements=requirements(),
                input_example=usable.example,
            )


@contextmanager
def _installed_only() -> Iterator[None]:
    """Hide the packages vendored by setuptools: once it has been imported, MLflow records their versions as installed,
    and would describe the same model in two ways."""
    path, hidden = sys.path, Path("setuptools", "_vendor")
    sys.path = [entry for entry in path if Path(*Path(entry).parts[-2:]) != hidden]
    try:
        yield
    finally:
        sys.path = path


def zip_package(target: Path) -> None:
    """Zip the package's code, reproducibly."""
    package = Path(image_diffusion.__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*.py")):
            entry = zipfile.ZipInfo(path.relative_to(package.parent).as_posix())
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())


def requirements() -> list[str]:
    """Return the packages for sampling and for loading the model in MLflow, pinned to the installed versions."""
    needed = [line for line in metadata.requires("image-diffusion") or [] if "extra ==" not in line]
    plain = {"mlflow", *(line.split(";")[0].rstrip("0123456789.*=<>!~, ") for line in needed)}
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in sorted(plain)]
