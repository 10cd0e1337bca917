"""This machine's fitness, memory, ports and addresses."""
