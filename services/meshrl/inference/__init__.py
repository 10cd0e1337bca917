"""5. An engine turns a weight version into tokens: the embedded engine and its HTTP server."""
