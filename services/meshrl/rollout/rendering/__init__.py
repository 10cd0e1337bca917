"""Chat messages as the tokens of the policy, and back; what stays of prompts that are rendered again and again."""
