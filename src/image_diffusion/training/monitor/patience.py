"""Early end of a training whose validation loss no longer improves."""

from __future__ import annotations

import math
from typing import Any


class Patience:
    """Early stopping: the smallest validation loss of a run, and the step at which the run ends early.

    steps: steps of the run. share: share of the steps after which a run without improvement ends; None: never. loss,
    step: smallest loss and its step; step 0 before any validation. ended_at: step of the early end; None before it.
    """

    def __init__(self, steps: int, share: float | None) -> None:
        self._steps, self._share = steps, share
        self.loss, self.step = math.inf, 0
        self.ended_at: int | None = None

    def observe(self, step: int, loss: float) -> None:
        """Record the loss of a validation, which is the same in every process."""
        if self._share is None:
            return
        if not self.step or loss < self.loss:
            self.loss, self.step = loss, step
        elif (step - self.step) / self._steps >= self._share:  # 7 / 100 is 0.07, but 0.07 * 100 is more than 7
            self.ended_at = step

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; empty before the first validation, and without early stopping."""
        return {"loss": self.loss, "step": self.step, "ended_at": self.ended_at} if self.step else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.loss, self.step, self.ended_at = state["loss"], state["step"], state["ended_at"]
