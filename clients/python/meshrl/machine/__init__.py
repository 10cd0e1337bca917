"""This machine: whether it is fit for the programs, and what memory they may use."""
