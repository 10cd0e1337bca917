"""The fork server's imports beside `preload` if only AutoTokenizer can choose a tokenizer's class.

Named to `multiprocessing`. It imports torch if that is installed.
"""

from meshrl.core.heap import loading

with loading():
    import transformers.models.auto.tokenization_auto
    from transformers import AutoTokenizer

__all__ = ["AutoTokenizer", "transformers"]
