"""A run over the nodes of a SLURM job: their addresses, their programs, and how these are started."""
