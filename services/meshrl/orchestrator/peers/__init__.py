"""The orchestrator as a client: connecting, uploading batches, following the trainer, relaying versions."""
