"""The ways on which a captured version leaves the trainer: files, a stream to the hub, a broadcast to the engines."""
