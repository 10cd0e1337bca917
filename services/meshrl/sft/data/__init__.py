"""The data of a fine-tuning run: rows of files become conversations, tokens and packed rows."""
