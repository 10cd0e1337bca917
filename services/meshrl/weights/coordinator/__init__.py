"""What the hub decides: versions, leases, commits. Pure rules, no I/O."""
