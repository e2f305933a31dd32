"""`dora-rl` as the blocks of a page meet it: the real program, on a shorter leash.

Three things differ from what the reader gets, and only these:
- `train` and `check` get the keys of SHORT behind their own, so that a run takes seconds, and
  `check` those of CHECKED, so that its answer does not depend on the cores of the test machine;
- more than NUM_STEPS_MAX training steps become NUM_STEPS_MAX;
- `serve` and `dashboard` go to the background once they answer, for the rest of the page.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

NUM_STEPS_MAX = 4
SHORT = {
    "orchestration.num_steps": "2",
    "orchestration.batch_groups": "4",
    "rollout.num_samples": "4",
    "rollout.tokens_max": "96",
    "checkpoint.every_steps": "1",
    "evaluation.num_prompts": "8",
    "logging.progress": "false",
}
CHECKED = {"rollout.num_instances": "1"}
STAYS = ("serve", "dashboard")
READY_S_MAX = 60.0


def shortened(arguments: list[str]) -> list[str]:
    """The arguments of one command with the keys above put in."""
    if arguments[:1] not in (["train"], ["check"]) or len(arguments) < 2:
        return arguments
    own = {word.partition("=")[0] for word in arguments if "=" in word}
    kept = [_capped(word) for word in arguments]
    added = SHORT | (CHECKED if arguments[0] == "check" else {})
    return [*kept, *(f"{key}={value}" for key, value in added.items() if key not in own)]


def _capped(word: str) -> str:
    found = re.match(r"^(orchestration\.num_steps=)(\d+)$", word)
    return f"{found.group(1)}{min(int(found.group(2)), NUM_STEPS_MAX)}" if found else word


def stay(command: list[str]) -> int:
    """Start it in a session of its own and wait until the address it prints accepts a caller."""
    log = Path(f".{command[3]}.log")
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    with Path(".staying").open("a") as pids:
        pids.write(f"{process.pid}\n")
    end = time.monotonic() + READY_S_MAX
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"http://([\w.]+):(\d+)", log.read_text())
        if found and _answers(found.group(1), int(found.group(2))):
            print(log.read_text(), end="")
            return 0
        time.sleep(0.1)
    print(log.read_text(), file=sys.stderr)
    return process.returncode or 1


def _answers(host: str, port: int) -> bool:
    with socket.socket() as caller:
        caller.settimeout(1.0)
        return caller.connect_ex((host, port)) == 0


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "dora_rl.cli", *shortened(arguments)]
    if arguments[:1] and arguments[0] in STAYS and "--help" not in arguments:
        return stay(command)
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
