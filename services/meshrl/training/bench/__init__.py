"""Measuring a learner on made-up data."""
