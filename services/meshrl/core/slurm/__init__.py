"""Jobs on a cluster: the [slurm] section, and how a program writes its batch script and submits it."""
