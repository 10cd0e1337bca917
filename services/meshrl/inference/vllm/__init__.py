"""The vLLM engine: vLLM's own async engine as an `Engine`, fed and updated like the embedded one."""
