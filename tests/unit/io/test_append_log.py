"""One rule for the ends of files: what is torn is cut, what is damaged is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.io.append_log import (
    FRAME,
    AppendLog,
    Damaged,
    checked,
    cut_lines,
    frame,
    frames,
    keep_lines,
    read_lines,
    text_of,
    whole_lines,
)

BODIES = [[b"first"], [b"", b"sec", b"ond"], [bytes(600)], [b"last"]]


def written(path: Path) -> bytes:
    log = AppendLog(path)
    for body in BODIES:
        log.append(*frame(body))
    log.close()
    return path.read_bytes()


def bodies_in(content: bytes) -> list[bytes]:
    return [bytes(body) for _, body in frames(memoryview(content), 0, "the file")]


def test_any_prefix_of_frames_is_whole_frames(tmp_path: Path) -> None:
    content = written(tmp_path / "f")
    whole = [b"".join(body) for body in BODIES]
    assert bodies_in(content) == whole
    for size in range(len(content)):
        found = bodies_in(content[:size])
        assert found == whole[: len(found)] and len(found) < len(whole)


def test_a_complete_frame_that_is_damaged_is_named_even_if_it_is_the_last(tmp_path: Path) -> None:
    content = bytearray(written(tmp_path / "f"))
    content[-1] ^= 1
    with pytest.raises(
        Damaged, match=f"the file is damaged at byte {len(content) - 4 - FRAME.size}"
    ):
        bodies_in(bytes(content))


@pytest.mark.parametrize("tail", [bytes(100), frame([b"x" * 2000])[0] + b"x" * 1400 + bytes(600)])
def test_what_a_power_cut_leaves_unwritten_is_torn(tmp_path: Path, tail: bytes) -> None:
    content = written(tmp_path / "f")
    assert bodies_in(content + tail) == bodies_in(content)


def test_a_torn_line_is_cut_when_the_file_is_opened_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines"
    log = AppendLog.of_lines(path)
    log.append(checked(b"one"), checked(b"two")[:-3])
    log.close()
    log = AppendLog.of_lines(path, synced=True)
    log.append(checked(b"three"))
    assert [text_of(line) for line in whole_lines(path.read_bytes())] == [b"one", b"three"]
    log.replace(checked(b"four"))
    log.append(checked(b"five"))
    log.close()
    assert [text_of(line) for line in whole_lines(path.read_bytes())] == [b"four", b"five"]
    assert [text_of(line) for line in (b"", b"zz\n", b"00000000 one\n", b"nothexxx one\n")] == [
        None
    ] * 4


def test_lines_of_json_keep_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2]
    cut_lines(path, lambda line: line["step"] < 2)
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'
    keep_lines(path, lambda line: line["step"] > 0)
    assert path.read_bytes() == b'{"step": 1}\n'
    damaged = b'{"step": 1}\n{"step\n'
    path.write_bytes(damaged)
    for look in (lambda: list(read_lines(path)), lambda: cut_lines(path, bool)):
        with pytest.raises(Damaged, match=r"metrics\.jsonl .*is damaged"):
            look()
    assert path.read_bytes() == damaged
