"""A run's past, on disk: which rollouts were counted, which batches were sent, where a restart goes on."""
