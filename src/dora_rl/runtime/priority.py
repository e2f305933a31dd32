"""Who goes first where a run has more busy processes than cores.

The learner does: a step is as long as its training, and what an instance generates later is still
generated in time. Linux weighs whole sessions against each other (autogroups), and every worker is
a session, so the group's niceness is set beside the process's own, which counts elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

NICENESS = 10
AUTOGROUP = Path("/proc/self/autogroup")


def make_way() -> None:
    """Let processes that did not call this go first. Needs no rights, and cannot be taken back."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid() and AUTOGROUP.exists():  # the session is ours alone
        try:
            AUTOGROUP.write_text(str(NICENESS))
        except OSError:
            return  # a container may forbid it
