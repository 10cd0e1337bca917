"""How a program proves who it is: certificates and TLS, also of HTTP, and secrets."""
