"""Jobs of Slurm and AWS Batch, and pods of Kubernetes, as Snakemake's executors create them for a stage.

The plugins of the last two come with the extra `executors`. Neither a cluster nor an account is needed, since
submissions are intercepted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import set_gres_string

from image_diffusion.workflow.resources import Machine
from plans import RESOURCES, a_plan, plans_of

ROOT = Path(__file__).resolve().parents[2]
ONE = {"experiment": "one"}
MEMORY_MB = 16_384


def machine(executor: str, **asked: int) -> Machine:
    plans = plans_of(a_plan(resources={**RESOURCES, "memory_mb": MEMORY_MB, **asked}))
    return Machine(plans, {}, queued=True, remote=False, executor=lambda: executor)


class Resources(dict[str, Any]):
    """Resources of a job, which Slurm's plugin reads as attributes as well."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def job(asking: Machine) -> SimpleNamespace:
    """A training as an executor receives it: resources that are None are left out, threads are `_cores`."""
    asked = asking.one_process(
        **asking.gpu_resources(asking.gpus), cpus_per_task=asking.training_cpus, mem_mb=asking.training_memory_mb
    )
    values = {name: value(ONE) for name, value in asked.items()}
    resources = Resources({name: value for name, value in values.items() if value is not None})
    resources["_cores"] = threads = asking.training_threads(ONE)
    return SimpleNamespace(
        resources=resources, threads=threads, name="train", jobid=1, attempt=1, is_containerized=False
    )


def pod(asking: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The specification of the pod that the plugin submits."""
    kubernetes = pytest.importorskip("kubernetes")
    plugin = pytest.importorskip("snakemake_executor_plugin_kubernetes")
    bodies = []

    def caught(namespace: str, body: Any) -> Any:
        bodies.append(kubernetes.client.ApiClient().sanitize_for_serialization(body))

    executor = plugin.Executor.__new__(plugin.Executor)
    executor.logger, executor.lock = logging.getLogger("caught"), threading.Lock()
    executor.batchapi = SimpleNamespace(create_namespaced_job=caught)
    executor.run_namespace, executor.namespace, executor.container_image = "run", "default", "image"
    executor.k8s_cpu_scalar, executor.k8s_service_account_name, executor.privileged = 1.0, None, False
    executor.persistent_volumes = [plugin.PersistentVolume("shared", Path("/shared"))]
    executor.secret_envvars = {}
    monkeypatch.setattr(plugin.Executor, "format_job_exec", lambda *_: "snakemake")
    monkeypatch.setattr(plugin.Executor, "report_job_submission", lambda *_: None)
    executor.run_job(job(asking))
    return bodies[0]["spec"]["template"]["spec"]


@pytest.mark.parametrize("gpus", [0, 2])
def test_slurm_job_requests_gpus_cores_and_memory_of_a_training(gpus: int) -> None:
    asking = machine("slurm", gpus_per_node=gpus, processes_per_node=2)
    names = ("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir")
    training = job(asking)
    command = (get_submit_command(training, dict.fromkeys(names, "name")) + set_gres_string(training)).split()
    assert {"--cpus-per-task=4", "--mem"} <= {*command} and command[command.index("--mem") + 1] == str(MEMORY_MB)
    assert [word for word in command if "gpu" in word] == (["--gres=gpu:2"] if gpus else [])


def test_pod_requests_gpus_cores_and_memory_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pod(machine("kubernetes", gpus_per_node=2, processes_per_node=2), monkeypatch)
    asked = {"nvidia.com/gpu": "2", "cpu": "4000m", "memory": f"{MEMORY_MB}M"}
    (container,) = spec["containers"]
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert [each["key"] for each in spec["tolerations"]] == ["nvidia.com/gpu"]
    assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]


def test_pod_on_cpus_requests_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pod(machine("kubernetes", gpus_per_node=0), monkeypatch)
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "2000m", "memory": f"{MEMORY_MB}M"}}
    assert "tolerations" not in spec


def test_kubernetes_plugin_ignores_the_gres_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the plugin does not read `gres`: the request has to be in its own resources."""
    asking = replace(machine("kubernetes", gpus_per_node=2), executor=lambda: "slurm")
    assert job(asking).resources["gres"] == "gpu:2"
    assert "nvidia.com/gpu" not in str(pod(asking, monkeypatch))


def test_shipped_pod_file_has_only_keys_known_to_kubernetes() -> None:
    """The client drops unknown keys when it parses a Job, and here drops none."""
    client = pytest.importorskip("kubernetes").client.ApiClient()
    written = (ROOT / "config/cloud/pod.yaml").read_text()
    response = SimpleNamespace(data=json.dumps(yaml.safe_load(written)))
    assert client.sanitize_for_serialization(client.deserialize(response, "V1Job")) == yaml.safe_load(written)


@pytest.mark.parametrize("gpus", [0, 2])
def test_aws_batch_job_requests_gpus_cores_and_memory_of_a_training(gpus: int) -> None:
    builder = pytest.importorskip("snakemake_executor_plugin_aws_batch.batch_job_builder")
    caught: dict[str, Any] = {}
    client = SimpleNamespace(register_job_definition=lambda **definition: caught.update(definition))
    settings = SimpleNamespace(job_role="role", task_timeout=300, tags=None)
    asking = machine("aws-batch", gpus_per_node=gpus, processes_per_node=2)
    builder.BatchJobBuilder(
        logger=logging.getLogger("caught"),
        job=job(asking),
        envvars={},
        container_image="image",
        settings=settings,
        job_command="snakemake",
        batch_client=client,
    ).build_job_definition()
    asked = {each["type"]: each["value"] for each in caught["containerProperties"]["resourceRequirements"]}
    assert asked == {"VCPU": "4", "MEMORY": str(MEMORY_MB)} | ({"GPU": "2"} if gpus else {})


def test_storage_provider_is_rejected_in_one_line(tmp_path: Path) -> None:
    plugin = pytest.importorskip("snakemake_storage_plugin_s3")
    shutil.copytree(ROOT / "config", tmp_path / "config")
    provider = ["--default-storage-provider", "s3", "--default-storage-prefix", "s3://bucket/run"]
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--dry-run", *provider],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(plugin.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: --default-storage-provider s3 stores only what rules declare") and "mirror" in line
    assert "Traceback" not in done.stderr and "MissingInputException" not in done.stderr
