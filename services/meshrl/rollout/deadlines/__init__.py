"""The stages of a rollout and how long each may take: who is overdue, what ends it, and what is logged about it."""
