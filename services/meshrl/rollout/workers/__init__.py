"""Worker processes that host environments."""
