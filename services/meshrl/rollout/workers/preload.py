"""What the fork server imports before it starts workers: all that is heavy, so that a worker is up in half a second.

Named to `multiprocessing`, imported by nobody else. Modules that others import only when they need them are listed too.
"""

from meshrl.core.heap import loading

with loading():
    import mcp
    from transformers import PreTrainedTokenizerFast

    import meshrl.environments.harness
    import meshrl.rollout.workers.worker

__all__ = ["PreTrainedTokenizerFast", "mcp", "meshrl"]
