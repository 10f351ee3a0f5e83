"""Makes `small_runs` importable, here and in the fresh processes that tests start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
