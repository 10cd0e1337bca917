"""The data of a fine-tuning run: rows of files become conversations, tokens, packed rows and each rank's batches."""
