"""The tables of bounds in docs/serving.md, written from the code.

    python tests/docs/serving_bounds.py docs/serving.md

Never says anything the code does not. Invariant: every row of `chat.bounds.FIELDS` and every limit
of `HttpLimits` is in the page; a test fails when the page is older than the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dora_rl.chat import bounds
from dora_rl.chat.bounds import (
    CALL,
    CALLED,
    CHAT,
    CLAUDE_TOOL,
    COMPLETION,
    FIELDS,
    FLAT_TOOL,
    ITEM,
    MESSAGE,
    MESSAGES,
    OPEN_SESSION,
    PART,
    RESPONSES,
    REWARD,
    TOOL,
    TURN,
)
from dora_rl.chat.http import HttpLimits
from dora_rl.chat.kinds import Record
from dora_rl.serve.server import CHARS_PER_TOKEN_MAX
from dora_rl.serve.service import ServeOptions

WHERE = {
    CHAT: "chat",
    COMPLETION: "completions",
    MESSAGES: "messages",
    RESPONSES: "responses",
    OPEN_SESSION: "sessions",
    REWARD: "reward",
}
INNER = (
    ("messages[]", MESSAGE, CHAT),
    ("messages[].content[]", PART, CHAT),
    ("messages[].tool_calls[]", CALL, CHAT),
    ("messages[].tool_calls[].function", CALLED, CHAT),
    ("messages[]", TURN, MESSAGES),
    ("messages[].content[]", bounds.BLOCK, MESSAGES),
    ("input[]", ITEM, RESPONSES),
    ("input[].content[]", bounds.ITEM_PART, RESPONSES),
)
TOOLS = ((TOOL, CHAT), (CLAUDE_TOOL, MESSAGES), (FLAT_TOOL, RESPONSES))
MARK, END = "<!-- written by tests/docs/serving_bounds.py -->\n", "<!-- end -->"
BLOCK = re.compile(f"{re.escape(MARK)}(.*?){re.escape(END)}", re.DOTALL)


def fields() -> str:
    rows = ["| field | of | must be | otherwise |", "|---|---|---|---|"]
    for one in FIELDS:
        where = ", ".join(WHERE[endpoint] for endpoint in one.of)
        default = "is needed" if one.needed else one.default
        rows.append(f"| `{one.name}` | {where} | {one.kind.text} | {default} |")
    for prefix, record, endpoint in INNER:
        for name, kind in record.fields:
            default = "is needed" if name in record.needed else "none"
            if not isinstance(kind, Record):
                rows.append(f"| `{prefix}.{name}` | {WHERE[endpoint]} | {kind.text} | {default} |")
    rows += [f"| `tools[]` | {WHERE[endpoint]} | {tool.text} | none |" for tool, endpoint in TOOLS]
    return "\n".join(rows) + "\n"


def limits() -> str:
    http, options = HttpLimits(), ServeOptions("")
    rows = [
        ("`connections_max`", f"{http.connections_max}", "503", "`--connections-max`"),
        ("`bodies_bytes_max`: of all bodies being read", mib(http.bodies_bytes_max), "503", ""),
        ("`texts_waiting_max`: requests", f"{options.texts_waiting_max}", "503", ""),
        ("responses generated or queued", f"{options.requests_max}", "429", "`--requests-max`"),
        ("sessions", f"{options.sessions_max}", "429", "`--sessions-max`"),
        ("a body", mib(http.body_bytes_max), "413", "`--body-mib-max`"),
        (
            "characters of a text, for each token of the context",
            f"{CHARS_PER_TOKEN_MAX}",
            "400",
            "",
        ),
        ("rendering and tokenising a text", f"{options.text_s_max:g} s", "400", ""),
        ("a header", f"{http.head_bytes_max >> 10} KiB", "400", ""),
        ("the header of a request", f"{http.head_s_max:g} s", "closed", ""),
        ("the body of a request", f"{http.body_s_max:g} s", "closed", ""),
        ("a client that does not read", f"{http.write_s_max:g} s", "closed", ""),
    ]
    lines = ["| limit | at most | beyond it | option |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def mib(size: int) -> str:
    return f"{size >> 20} MiB"


def updated(page: str) -> str:
    """The page with today's tables in its two places."""
    tables = iter((fields(), limits()))
    return BLOCK.sub(lambda found: MARK + next(tables) + END, page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
