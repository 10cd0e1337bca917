"""Reports of a run for people: the record of each step, samples and alerts."""
