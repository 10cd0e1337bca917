"""`meshrl conformance`: asks a server of any language what the contract promises, over a real channel."""
