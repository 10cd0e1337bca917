"""Chat messages as the tokens of the policy, and back."""
