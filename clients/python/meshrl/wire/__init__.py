"""The messages between services as plain Python: dataclasses, tensors, manifests and errors."""
