"""How weights travel through a group of processes, for the nccl transport: digest, plan, senders, receivers."""
