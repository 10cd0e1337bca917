"""Worker processes that host environments, and the front's side of them."""
