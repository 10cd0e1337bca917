"""The vLLM engine: vLLM's own async engine behind the `Engine` protocol, fed and updated like the embedded one."""
