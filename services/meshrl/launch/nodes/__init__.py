"""A run over the nodes of a SLURM job: which they are, what each works on, and how programs are started there."""
