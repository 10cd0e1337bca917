"""The numbers that programs report: their names and how they are computed."""
