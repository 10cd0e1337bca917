"""Bundled environments (tasksets for verifiers), and the in-process harness that plays them; hosted by `rollout`."""
