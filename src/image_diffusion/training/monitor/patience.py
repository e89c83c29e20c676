"""The step at which a training ends: the last one, or earlier where the validation loss no longer improves."""

from __future__ import annotations

import math
from typing import Any


class Patience:
    """The smallest validation loss of a run, and the step at which the run ends.

    steps: of the run. share: of them, after which a run without improvement ends; None: it always ends at the last.
    end: the step at which it ends, as far as is known. loss, step: of the smallest loss; step 0 before any validation.
    """

    def __init__(self, steps: int, share: float | None) -> None:
        self._steps, self._share = steps, share
        self.end = steps
        self.loss, self.step = math.inf, 0

    @property
    def ended_early(self) -> str | None:
        """Return why the run ends before its last step, in a sentence; None where it does not."""
        if self.end == self._steps:
            return None
        return (
            f"The training ends at step {self.end:,} of {self._steps:,}: the validation loss is smallest, "
            f"{self.loss:.4g}, at step {self.step:,}, and train.patience is {self._share:g}."
        )

    def observe(self, step: int, loss: float) -> None:
        """Take in the loss of a validation, which is the same in every process."""
        if self._share is None:
            return
        if not self.step or loss < self.loss:
            self.loss, self.step = loss, step
        elif step - self.step >= self._share * self._steps:
            self.end = step

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; empty before the first validation, and where every run ends at its last step."""
        return {"loss": self.loss, "step": self.step, "end": self.end} if self.step else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the data of `state_dict`, of a run of as many steps."""
        self.loss, self.step, self.end = state["loss"], state["step"], state["end"]
