"""Runs the code cells of a notebook in `__main__`, as a kernel does. A program of its own.

    python notebook_driver.py NOTEBOOK.ipynb

Each cell's source is where IPython puts it: known to `linecache` under a name that is no file. The
last line says what came of the notebook's `run`.
"""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path


def main(path: str) -> None:
    scope = sys.modules["__main__"].__dict__
    for number, cell in enumerate(json.loads(Path(path).read_text())["cells"]):
        if cell["cell_type"] == "code":
            text, name = "".join(cell["source"]), f"<ipython-input-{number}>"
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            exec(compile(text, name, "exec"), scope)
    run = scope["run"]
    first, last = run.summary["reward_first"], run.summary["reward_last"]
    print(json.dumps({"done": run.done, "heard": len(scope["rewards"]), "learned": last - first}))


if __name__ == "__main__":
    main(sys.argv[1])
