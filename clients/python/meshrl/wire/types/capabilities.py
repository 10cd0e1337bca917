"""What a peer can do beyond the fields of the contract version: the names that first calls carry both ways.

docs/contract.md lists them.
"""

from __future__ import annotations

REATTACH = "rollouts.reattach"

ROLLOUT = (REATTACH,)
"""Of this repository's rollout service."""
ROLLOUT_CALLER = (REATTACH,)
"""Of its clients."""
