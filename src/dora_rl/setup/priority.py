"""Who goes first where a run has more busy processes than cores.

The learner does: a step is as long as its training, and what an instance generates later is still
generated in time. Linux weighs whole sessions against each other (autogroups), and every worker is
a session, so the group's niceness is set beside the process's own, which counts elsewhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

NICENESS = 10
AUTOGROUP = Path("/proc/self/autogroup")
TRIES, PAUSE_S = 20, 0.1  # the kernel takes one such wish every 100 ms from those without rights


def make_way() -> None:
    """Let processes that did not call this go first. Needs no rights, and cannot be taken back."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid() and AUTOGROUP.exists():  # the session is ours alone
        _set_group()


def _set_group() -> None:
    for _ in range(TRIES):
        try:
            AUTOGROUP.write_text(str(NICENESS))
            return
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError:
            return  # a container may forbid it
