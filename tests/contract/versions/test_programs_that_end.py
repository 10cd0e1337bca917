"""A program that ends while it waits for the other members of a collective group ends in order, and soon."""

from __future__ import annotations

import subprocess
import sys
import time


def test_program_that_ends_while_it_meets_ends_in_order() -> None:
    script = """
import threading, time, torch
from meshrl.versions.collective.communicator import Communicator, open_store
store = open_store("127.0.0.1", deadline_s=10.0)
store.set("g1/s0/here/1", "1")  # who came, and is gone since
how = dict(generation=1, sender=0, rank=0, size=2, backend="gloo", device=torch.device("cpu"), deadline_s=2.0)
threading.Thread(target=lambda: Communicator(store, **how), daemon=True).start()
time.sleep(0.5)
"""
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60.0)
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - began_s > 2.0  # it waited for the meeting's own deadline


def test_program_that_ends_while_it_looks_for_others_ends_at_once() -> None:
    script = """
import threading, time, torch
from meshrl.versions.collective.communicator import Communicator, open_store, reach_store
how = dict(generation=1, sender=0, rank=0, size=2, backend="gloo", device=torch.device("cpu"), deadline_s=600.0)
reach = lambda: reach_store("127.0.0.1:9", deadline_s=600.0)  # where nobody listens
meet = lambda: Communicator(open_store("127.0.0.1", deadline_s=9.0), **how)  # whose other rank never comes
for waits in (reach, meet) * 4:
    threading.Thread(target=waits, daemon=True).start()
time.sleep(0.5)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100.0)
    assert ended.returncode == 0, ended.stderr
