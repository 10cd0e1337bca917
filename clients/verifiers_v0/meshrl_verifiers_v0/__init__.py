"""Serves environments of the older verifiers API as a RolloutService."""
