"""Bundled tasksets and the in-process harness that plays them."""
