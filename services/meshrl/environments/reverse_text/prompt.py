"""The example's prompt; the taskset and the warm-up data must agree on it."""

SYSTEM_PROMPT = "Reverse the text."
