"""Names of the commands. Of the stages only `track` imports them, so that a new command does not change the code of the
others."""

from __future__ import annotations

COMMANDS = (
    *("init", "configure", "crop", "datasheet", "detect", "reference", "encode", "embed", "doctor", "train", "ema"),
    *("sample", "evaluate", "sweep", "synthesize", "export", "track", "mirror"),
)
"""Every command, in the order of use."""

_TOOLS = ("init", "configure", "mirror")


def module_of(name: str) -> str:
    """Return the dotted name of the module of a command: a file of `stages`, or of `tools`."""
    return f"image_diffusion.{'tools' if name in _TOOLS else 'stages'}.{name}"
