"""How the ranks of a trainer keep in step: rank 0 sends commands, the others carry them out."""
