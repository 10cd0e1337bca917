"""The fork server's imports before it starts vLLM's processes, which spares their garbage collectors them."""

from meshrl.core.heap import loading

with loading():
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor

    import meshrl.inference.main  # the main module of the program, which each process runs through
    import meshrl.inference.vllm.gpu_worker
    import meshrl.inference.vllm.whole_completions

__all__ = ["meshrl", "vllm"]
