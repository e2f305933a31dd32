import sys
from importlib.util import find_spec
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "e2e")]
if find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]
