"""What every service is built from: configuration, serving, logs, telemetry, paths."""
