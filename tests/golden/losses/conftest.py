"""Puts the plain Python losses on the path: importlib mode puts no test folder there."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
