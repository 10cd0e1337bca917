"""The weight hub: a version that the trainer published reaches every engine, as a transaction."""
