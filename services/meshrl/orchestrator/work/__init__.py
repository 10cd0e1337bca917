"""What is generated and trained: groups of rollouts, their filters and freshness, the batches they become."""
