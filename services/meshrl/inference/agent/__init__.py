"""The agent of an engine: it follows the weight hub and loads new versions into the engine."""
