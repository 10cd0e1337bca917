"""Starts a whole run from one configuration: `rl` resolves it, starts the five programs and watches over them."""
