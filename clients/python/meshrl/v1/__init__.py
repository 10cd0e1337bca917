"""Generated from proto/meshrl/v1 by `make proto`; do not edit."""
