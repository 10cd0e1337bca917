"""The HTTP server of an engine: OpenAI routes, the token route, admin routes, health."""
