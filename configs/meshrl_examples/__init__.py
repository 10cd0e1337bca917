"""What the examples of `configs/` share: their model, made-up words, a score, and the files of demonstrations."""
