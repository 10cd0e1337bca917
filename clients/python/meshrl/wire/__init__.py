"""What travels between services, as plain Python: dataclasses, tensors, manifests and errors."""
