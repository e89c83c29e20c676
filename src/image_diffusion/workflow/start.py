"""Start of Snakemake: resolve the experiments to plans for the rules."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from image_diffusion.core.files.atomic import digest, sha256_file
from image_diffusion.core.native import fault_of
from image_diffusion.core.process.out_of_resources import sentence_on
from image_diffusion.core.process.parent_watch import end_with_parent
from image_diffusion.core.process.secrets import variable_of
from image_diffusion.workflow.code_digest import note_code
from image_diffusion.workflow.environment import package_beside, search_path
from image_diffusion.workflow.inputs import Files
from image_diffusion.workflow.jobs.gpu_locks import VARIABLE, devices_here
from image_diffusion.workflow.locks import lock_results
from image_diffusion.workflow.mirror.mirror_process import Mirroring
from image_diffusion.workflow.parts import Parts, look_at_sources
from image_diffusion.workflow.plans import Plans
from image_diffusion.workflow.resolve import requested, resolve, resolved
from image_diffusion.workflow.resources import Machine
from image_diffusion.workflow.snakemake_patches import ignore_parts_in_records

_LISTS = {"--list-rules", "--list", "-l", "--list-target-rules", "--lt", "--lint"}
"""Arguments that make Snakemake only list its rules, which are independent of the files of data sets."""


@dataclass(frozen=True)
class WorkflowContext:
    """Context that the rules receive."""

    results: str
    """Folder of all results."""
    plans: Plans
    files: Files
    parts: Parts
    machine: Machine
    code: Mapping[str, str]
    """Digest of each stage's code."""
    pages: str
    """Digest of the scripts and templates of the pages, and of the package code that they import."""
    lock: TextIO | None
    """Open lock file that keeps other Snakemakes out of the results."""


def start(
    root: Path,
    config: Mapping[str, Any],
    queued: bool,
    remote: bool,
    moved: Callable[[str], str] = str,
    arguments: Sequence[str] = (),
    cores: int = 1,
    limit: int | None = None,
    executor: Callable[[], str] = lambda: "local",
    is_head: bool = False,
    holds: bool = False,
    beside: bool = False,
    provider: str | None = None,
) -> WorkflowContext:
    """Resolve everything once, where Snakemake was started; jobs on other machines use the cached result.

    root: the folder of the workflow. config: its configuration. queued: True if jobs are sent to a queue. remote: True
    if this is one of those jobs. moved: Snakemake's transformation of the paths that rules declare. arguments: of its
    command line, which may name experiments. cores: of this machine. limit: maximum number of its GPUs in use at once,
    if set. executor: returns the name of Snakemake's executor once jobs are planned. is_head: True if this process
    starts jobs in its own folder, which is then mirrored. holds: True if this process locks the results. beside: True
    if another Snakemake runs here. provider: Snakemake's storage provider. Processes started on this machine end with
    Snakemake and find the URI of MLflow's store in their environment. On an error, Snakemake exits with one line.
    """
    if provider:  # no rule declares shards, checkpoints and journals
        raise SystemExit(
            f"error: --default-storage-provider {provider} stores only what rules declare: shards, checkpoints and "
            "journals would be lost. Use a file system that all jobs share, or one machine with --config mirror=… "
            "(docs/cloud.md)."
        )
    ignore_parts_in_records()
    os.environ["PATH"] = search_path(root, os.environ.get("PATH", os.defpath))
    end_with_parent(os.environ, queued=remote)
    results = str(Path(str(config.get("results", "results"))))  # one spelling of a/, ./a and a, for the rules
    mirroring = Mirroring(config.get("mirror") if is_head else None, results, package_beside(root))
    # After the mirror, which may refuse this machine before it writes.
    lock = lock_results(Path(results)) if holds else None
    try:
        if moved(f"{results}/") != f"{results}/":
            raise ValueError(
                "The module has a prefix, which does not reach the paths that are written into files. Leave out prefix "
                "and replace_prefix, and set `results` in the module's config."
            )
        if remote:
            code, targets = resolved(Path(results))
        else:
            targets = requested(config, arguments)
            code = resolve(root, {**config, **targets}, beside)
        plans = Plans.read(results, targets["experiments"], targets["study"])
        if remote:  # Snakemake may have been started for other experiments since this job was submitted
            plans = plans.with_all_plans(results)
        else:
            if not _LISTS & set(arguments):
                look_at_sources(plans, Path(results), config.get("trust_ctime", True))
            compiled = sorted(Path(__file__).parents[1].rglob("*.compiled"))
            for sentence in (*note_code(plans, Path(results), code), *filter(None, map(fault_of, compiled))):
                print(sentence, file=sys.stderr)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {sentence_on(error) or error}") from None
    os.environ[variable_of(config["tracking"]["uri"])] = config["tracking"]["uri"]
    mirroring.fetch([*plans.by_name, *(f"datasets/{name}" for name in plans.datasets)])
    machine = Machine(plans, config, queued, remote, cores, executor=executor)
    if machine.uses_gpus and len(devices := devices_here(os.environ)) > 1:
        os.environ[VARIABLE] = ",".join(devices)
        machine = replace(machine, devices=devices, limit=limit)
    folders = (root / "workflow" / "pages", root / "workflow" / "scripts")
    pages = digest({path.name: sha256_file(path) for folder in folders for path in folder.iterdir() if path.is_file()})
    return WorkflowContext(
        results=results,
        plans=plans,
        files=Files(results, plans),
        parts=Parts(results, plans, machine.jobs_at_once),
        machine=machine,
        code=code,
        pages=digest([pages, code["pages"]]),
        lock=lock,
    )
