"""`meshrl conformance`: checks a server of any language over a real channel."""
