"""Lets tests of this folder import tests/oracle.py and families.py."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
