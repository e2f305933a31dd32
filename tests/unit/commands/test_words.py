"""A full disk under the program's own output takes its words, not its work or its status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.commands.words import may_be_lost

PROGRAM = """
import sys
from dora_rl.cli import in_one_line, while_read
from dora_rl.commands.words import may_be_lost

@may_be_lost()
def work():
    for number in range(1000):
        print("words", number)
        print("more", number, file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("done")
    return 3

sys.exit(while_read(lambda: in_one_line(work, debug=False)))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_changes_no_status(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(done)], stdout=full, stderr=full, check=False
        )
    assert ended.returncode == 3 and done.read_text() == "done"


def test_words_arrive_where_there_is_room(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "done")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 3
    assert ended.stdout.splitlines()[-1] == "words 999" and len(ended.stderr.splitlines()) == 1000


def test_another_fault_of_the_output_is_still_told(capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as nobody, pytest.raises(BrokenPipeError):
        before, sys.stdout = sys.stdout, nobody
        try:
            with may_be_lost():
                print("words", flush=True)
        finally:
            sys.stdout = before
            os.dup2(os.open(os.devnull, os.O_WRONLY), nobody.fileno())
