"""Makes the model of the examples: `python -m meshrl.environments.reverse_text.model FOLDER`."""

from meshrl_examples.model import create_model, create_tokenizer, main

__all__ = ["create_model", "create_tokenizer"]

if __name__ == "__main__":
    main()
