"""What can be known before the programs of a run are started: everything that is wrong is said at once, by `rl` itself.

One file a topic; a check is a function from a `Plan` to what it found. `checks.py` lists them.
"""
