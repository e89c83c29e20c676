"""Snakemake that checks its Slurm jobs every two seconds.

The executor waits 10 seconds longer after each check in which no job has ended, so that a small pipeline would spend
most of its time waiting. The check itself is not changed. Takes Snakemake's own arguments.
"""

import asyncio

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

INTERVAL_S = 2


async def _sleep(_: RemoteExecutor) -> None:
    await asyncio.sleep(INTERVAL_S)


if __name__ == "__main__":
    RemoteExecutor.sleep = _sleep  # type: ignore[method-assign]
    main()
