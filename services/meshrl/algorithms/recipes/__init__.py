"""The algorithms that an environment may be trained with, one a file."""
