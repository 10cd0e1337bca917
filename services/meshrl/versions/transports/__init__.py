"""The ways by which a captured version leaves the trainer: files, a stream to the hub, a broadcast to the engines."""
