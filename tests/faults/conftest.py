"""Fault tests share the small models and runs of the tests of these folders."""

import sys
from pathlib import Path

for folder in ("training", "objectives"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
