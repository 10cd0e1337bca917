"""The fork server's imports before it starts workers: all heavy modules, so that a worker is up in half a second.

Modules that others import lazily are listed too.
"""

from meshrl.core.heap import loading

with loading():
    import mcp
    from transformers import PreTrainedTokenizerFast

    import meshrl.environments.harness
    import meshrl.rollout.workers.worker

__all__ = ["PreTrainedTokenizerFast", "mcp", "meshrl"]
