"""The chain of the event log: every line carries a digest over itself and the digest before it.

A line that was changed, removed, added or moved breaks the chain at the next line, whatever its own
checksum says. Against accidents and buggy code: whoever rewrites every line can make a new chain.
Lines of releases before the chain have no digest; they are counted, never believed to be chained.

    {"n":7, ..., "h":"90f1c8a1d2b3c4e5"}     h = blake2b-64(h of the line before + line without h)
"""

from __future__ import annotations

from hashlib import blake2b

_BEGIN, _END = b',"h":"', b'"}\n'
_CHARS = 16
_SUFFIX = len(_BEGIN) + _CHARS + len(_END)
TAIL_BYTES = _SUFFIX  # of a file, enough to read the digest of its last line


def chained(previous: str, body: bytes) -> tuple[bytes, str]:
    """A JSON object with its digest as the last field, and the digest."""
    digest = blake2b(previous.encode() + body, digest_size=_CHARS // 2).hexdigest()
    return b"%s%s%s%s" % (body[:-1], _BEGIN, digest.encode(), _END[:-1]), digest


def digest_in(tail: bytes) -> str:
    """The digest at the end of a line, "" if it has none."""
    if tail[-_SUFFIX : -_SUFFIX + len(_BEGIN)] != _BEGIN or not tail.endswith(_END):
        return ""
    return tail[-_SUFFIX + len(_BEGIN) : -len(_END)].decode(errors="replace")


class ChainCheck:
    """Follows the chain line by line. `problem` is what is wrong with the last line, or ""."""

    def __init__(self) -> None:
        self.num_chained = 0
        self.num_unchained = 0
        self.problem = ""
        self._previous = ""

    def see(self, line: bytes) -> None:
        """`line` as it lies in the file: checksum, blank, JSON, newline."""
        self.problem = ""
        digest = digest_in(line)
        if not digest:
            self.num_unchained += 1
            if self.num_chained:
                self.problem = "has no digest, and entries before it have one"
        else:
            self.num_chained += 1
            body = line[9:-_SUFFIX] + b"}"
            if chained(self._previous, body)[1] != digest:
                self.problem = (
                    "its digest does not follow from the line before it: a line was changed, "
                    "removed, added or moved"
                )
        self._previous = digest
