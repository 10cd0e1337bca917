"""The messages between services in plain Python: dataclasses, tensors, manifests and errors."""
