"""Settings of every test: kernels on one thread, so that tests side by side do not starve each other."""

import ast
import functools
import gc
import os
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

_parse = ast.parse


@functools.wraps(_parse)
def _parse_uncollected(*args: Any, **kwargs: Any) -> Any:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(*args, **kwargs)
    finally:
        if was_enabled:
            gc.enable()


if sys.version_info < (3, 11, 8):
    # pytest parses source to report a failure. There that ends the whole session with a SystemError whenever a
    # garbage collection in the midst of it logs a traceback, which is parsed, too: CPython issue 106905.
    ast.parse = _parse_uncollected
