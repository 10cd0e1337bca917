"""The telemetry of every program: logs, traces, metrics."""
