# Snakemake calls these blocks, one of each kind, for the workflow that it is started with, not for its modules.
import sys
from pathlib import Path

from image_diffusion.workflow.environment import package_beside
from image_diffusion.workflow.jobs.live_tracking import Following
from image_diffusion.workflow.parts import remove_left_parts
from image_diffusion.workflow.plans import write_partial_pages
from image_diffusion.workflow.jobs.slurm_queue import orphans, report_failed_jobs, settle_orphans, tell_of_unseen_jobs
from image_diffusion.workflow.terminal import outcome, places, request

following = Following(config["tracking"], package_beside(root), results, plans.by_name)


onstart:
    trainings = (job.wildcards for job in workflow.dag.needrun_jobs() if job.rule.name.endswith("train"))
    if too_few := machine.too_few_devices(trainings):
        raise SystemExit(f"error: {too_few}")
    if owner.is_ours and not workflow.touch and (left := orphans(Path())):
        settle_orphans(left, workflow.dag.needrun_jobs(), wait=config.get("orphans", "wait") == "wait")
    sent = {workflow.dag.get_job_group(job) or job for job in workflow.dag.needrun_jobs()}
    if machine.queued and (table := request(sent, machine.executor())):
        print(table, file=sys.stderr)
    following.start()


onsuccess:
    following.end()
    settings = workflow.dag_settings
    if not (workflow.touch or set(settings.targets) - plans.by_name.keys() or settings.until or settings.omit_from):
        remove_left_parts(plans, Path(results))
    print(outcome(plans, Path(results)) + places(plans, Path(results), config["tracking"]["uri"]), file=sys.stderr)


onerror:
    following.end()
    write_partial_pages(results, plans.studies, root / "workflow" / "scripts" / "study.py", package_beside(root))
    report_failed_jobs(log, machine.since)
    tell_of_unseen_jobs(log)
