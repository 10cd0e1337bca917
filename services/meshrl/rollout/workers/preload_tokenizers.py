"""The fork server's imports beside `preload` if only AutoTokenizer can choose a tokenizer's class; torch among them."""

from meshrl.core.heap import loading

with loading():
    import transformers.models.auto.tokenization_auto
    from transformers import AutoTokenizer

__all__ = ["AutoTokenizer", "transformers"]
