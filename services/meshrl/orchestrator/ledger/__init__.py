"""A run's past, on disk: the rollouts counted, the batches sent, and where a restart goes on."""
