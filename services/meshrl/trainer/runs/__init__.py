"""What belongs to one run of a trainer: its steps, the queue to the training thread, and the table that finds it."""
