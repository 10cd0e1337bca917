"""Reports of a run for people: the record of each step, samples, traces and the table of a benchmark; fed by the
loop."""
