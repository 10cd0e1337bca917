"""What the fork server imports before it starts workers: all that is heavy, so that a worker is up in half a second.

Named to `multiprocessing`, imported by nobody else. Modules that others import only when they need them are listed too.
"""

from meshrl.core.heap import loading

with loading():
    import mcp
    import transformers.models.auto.tokenization_auto
    from transformers import AutoTokenizer

    import meshrl.environments.harness
    import meshrl.rollout.workers.worker

__all__ = ["AutoTokenizer", "mcp", "meshrl", "transformers"]
