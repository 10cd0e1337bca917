"""A weight version as bytes: types, digests, and the ways it travels between trainer, hub and engines."""
