"""Whatever a client sends is answered: with what it asked for, or with one line and a 4xx."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.kit.places import ROOT
from tests.kit.tinker_server import tinker_server

LOG = json.loads((ROOT / "tests" / "vectors" / "tinker_sdk.json").read_text())["log"]
BODIES = {entry["path"]: entry for entry in LOG if entry["method"] == "POST"}
ODD: list[Any] = [
    None,
    True,
    -1,
    1 << 70,
    1.5,
    1e400,
    "",
    "x" * 5000,
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
]
BYTES = [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"null", b'{"a":' * 3000, b"NaN", b"\0" * 100]


def changed(draw: random.Random, value: Any) -> Any:
    """One field somewhere in it is another value, or gone."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        if draw.random() < 0.2:
            return {name: inner for name, inner in value.items() if name != key}
        return value | {key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return [*value[:at], changed(draw, value[at]), *value[at + 1 :]]
    return draw.choice(ODD)


def test_no_body_is_an_error_of_ours(tmp_path: Path) -> None:
    draw = random.Random(3)
    with tinker_server(tmp_path) as served:
        client = served.client()
        model = client.model()
        paths = [path for path in BODIES if not path.endswith("/finish")]
        for path in paths:
            entry = BODIES[path]
            bodies = list(BYTES)
            if "protobuf" in entry["type"]:
                whole = bytes.fromhex(entry["body"])
                bodies += [whole[: draw.randrange(len(whole))] for _ in range(10)]
            else:
                known = json.loads(entry["body"])
                for _ in range(30):
                    odd = json.dumps(changed(draw, known)).replace("Infinity", "1e999")
                    bodies.append(odd.encode())
            for body in bodies:
                answer = client.http.post(path, content=body)
                assert answer.status_code in (200, 400, 404, 429), (path, body[:200], answer.text)
                if answer.status_code != 200:
                    line = answer.json()["error"]["message"]
                    assert line and "\n" not in line and len(line) < 500
        for path in ("/api/v1/none", "/api/v1/samplers/a%2Fb", "/api/v1/training_runs/..%2Fx"):
            assert client.http.get(path).status_code == 404
        assert client.http.get("/api/v1/training_runs?limit=x").status_code == 400
        assert model.step() == 0.0, "it goes on"
