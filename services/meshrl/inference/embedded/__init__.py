"""The engine that runs in this process: continuous batching of a Hugging Face model."""
