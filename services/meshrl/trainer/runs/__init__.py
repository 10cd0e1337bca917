"""A trainer's runs: their steps, queues, settings and checkpoints, and the table that finds them."""
