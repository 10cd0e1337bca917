"""What a run has done, on disk: which rollouts were counted, which batches were sent, where a restart goes on."""
