"""Versions as changes against the version before: their byte format, their digests, and images that they apply to."""
