"""What the examples of `configs/` share."""
