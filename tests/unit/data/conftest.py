"""Makes the modules of `recipes` importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))
