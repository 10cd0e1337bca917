"""What every program says about itself: logs, traces, metrics."""
