"""What the fork server imports before vLLM's processes come out of it. Named to `multiprocessing`, imported by nobody
else."""

from meshrl.core.heap import loading

with loading():
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor

    import meshrl.inference.main  # the main module of this program, which each process runs through
    import meshrl.inference.vllm.whole_completions
    import meshrl.inference.vllm.worker
    from meshrl.inference.vllm.installed import start_processes_by
    from meshrl.inference.vllm.processes import ForkServer, keep_fork_server

    if vllm.platforms.current_platform.is_cuda_alike():
        import meshrl.inference.vllm.gpu_worker

keep_fork_server()
start_processes_by(ForkServer())  # the workers of an engine that is split over several GPUs

__all__ = ["meshrl", "vllm"]
