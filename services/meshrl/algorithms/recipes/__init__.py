"""The algorithms that an environment may be trained with, one a file: who samples, what is scored, what is trained."""
