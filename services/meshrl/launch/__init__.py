"""Starts a whole run from one configuration: `rl` starts five programs and watches over them."""
