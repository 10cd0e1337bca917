"""Pure tensor math of a step: advantages, packing and losses; no gRPC and no I/O."""
