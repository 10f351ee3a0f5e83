"""Makes the small runs and families of the other folders importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("training", "models")]
