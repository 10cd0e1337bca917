"""The stages of a rollout and how long each may take: who is overdue, what ends it, and what the log says of it."""
