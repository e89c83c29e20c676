"""Failed jobs of a queue, with stand-ins for the commands of Slurm: sbatch accepts every job and every job fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from projects import Project

JOBS = 20
HANGS_S = 25
STAND_INS = {
    # The job's note: the first line as `logged` writes it on a node, the last as a stage writes it on a mistake.
    "sbatch": r"""
job=$(echo "$*" | grep -o 'dataset=set[0-9]*' | head -n 1 | tr -dc 0-9)
note=logs/datasets/set$job-16/crop.log.attempt
mkdir -p "$(dirname $note)"
printf '%s\n' "$job n1 $(date +%s)" '["mistake", "The image is too small."]' >>$note
touch .snakemake/slurm_logs/rule_crop/set$job-16/$job.log
echo $job""",
    "squeue": f'[[ "$*" == *%V* ]] || for job in $(seq {JOBS}); do echo "$job|FAILED"; done',
    # The plugin also calls it to guess an account.
    "sacct": f'[[ "$*" == *job* || "$*" == *-j* ]] || exit 1; echo >>"$STATE/asked"; exec sleep {HANGS_S}',
    "sinfo": "echo main",
    "scontrol": "echo MinJobAge = 300 sec",
    "scancel": "exit 0",
}


@pytest.fixture
def queue(fresh: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Project of many data sets, and a simulated Slurm whose accounting hangs."""
    for name, script in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path))
    for number in range(1, JOBS + 1):
        folder = fresh / f"images-{number}"
        folder.symlink_to("images")
        experiment = f"base: micro\ndata: {{name: set{number}, source: {{path: {folder.name}}}}}\n"
        (fresh / f"config/experiments/micro_{number}.yaml").write_text(experiment)
    return fresh


@pytest.mark.slow
@pytest.mark.long
def test_snakemake_does_not_wait_for_an_accounting_that_hangs(queue: Project, tmp_path: Path) -> None:
    names = ",".join(f"micro_{number}" for number in range(1, JOBS + 1))
    queue.planned("--config", f"experiments=[{names}]")  # resolves the experiments
    began = time.monotonic()
    done = queue.snakemake(
        *("--config", f"experiments=[{names}]", "--executor", "slurm", "--jobs", "100", "--keep-going"),
        *("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1"),
        *("--until", "crop"),
    )
    took_s = time.monotonic() - began
    assert done.returncode == 1
    assert took_s < 4 * HANGS_S, f"{took_s:.0f} s for {JOBS} failed jobs"
    told = [line for line in done.stdout.splitlines() if "The image is too small." in line]
    assert len(told) == JOBS, done.stdout
    assert (tmp_path / "asked").read_text() == "\n", "once, after all jobs have ended"
