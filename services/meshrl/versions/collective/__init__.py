"""How a version travels by broadcast through a group of processes: plan, senders, receivers."""
