"""How many decode steps are launched at once, where a GPU may be faster than its host.

Pure. A longer burst saves the host work, and costs surplus rows where a response ends inside it.
"""

from __future__ import annotations

FED_LAUNCHES = 16  # in a row for which the GPU never waited, before bursts get shorter


class Bursts:
    """Twice as long whenever the GPU has waited, shorter by one when it has not for a while."""

    def __init__(self, steps_max: int) -> None:
        self._steps_max, self._num_fed = steps_max, 0

    def after(self, steps: int, starved: bool) -> int:
        """The next burst, after one of `steps` at whose launch the GPU had run out of work or not.
        Between 1 and `steps_max`."""
        self._num_fed = 0 if starved else self._num_fed + 1
        if starved:
            return min(self._steps_max, 2 * steps)
        if self._num_fed < FED_LAUNCHES:
            return steps
        self._num_fed = 0
        return max(1, steps - 1)
