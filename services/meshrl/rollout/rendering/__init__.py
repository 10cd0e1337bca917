"""Chat messages as the tokens of the policy, and back; and caches of prompts that are rendered repeatedly."""
