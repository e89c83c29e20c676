"""Snakemake that looks at its Slurm jobs every two seconds.

The executor waits 10 seconds longer after each look at which no job has ended, so that most of the time of a small
pipeline would be spent waiting. What it does at each look is not changed. Takes Snakemake's own arguments.
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
