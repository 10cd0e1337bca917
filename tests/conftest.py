"""Settings of every test: kernels on one thread, so that tests side by side do not starve each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
