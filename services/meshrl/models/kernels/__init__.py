"""Kernels of GPUs, for attention over packed rows and for the output head."""
