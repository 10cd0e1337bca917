"""Checks that `rl` makes before a run begins, so that all problems are reported at once.

A check is a function from a `Plan` to its findings; `checks.py` lists them.
"""
