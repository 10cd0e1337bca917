"""A learner on several processes: starting them, their groups, and how the model is sharded over them."""
