"""Says what a rollout is doing, for the message of whoever ends it; asked by `episodes` when a deadline passes."""

from __future__ import annotations

from verifiers.v1.trace import Trace

from meshrl.rollout.engines.sessions import Session


def describe(trace: Trace, session: Session, now_s: float) -> str:
    """What an agent's run does at `now_s` (time.time) and for how long its stage has lasted.

    verifiers stamps the begin of each stage on the trace; within the agent's stage the session knows the call.
    """
    timing = trace.timing
    stages = (
        ("between two runs of its agents, or in the environment's finalize", timing.scoring.end),
        ("in its rewards and metrics", timing.scoring.start),
        ("in the task's finalize", timing.finalize.start),
        ("closing its tools", timing.agent.end),
        (session.doing or "in its harness, between two model calls", timing.agent.start),
        ("starting its tool servers" if session.reachable else "in the set-up of task and harness", timing.setup.start),
        ("starting its runtime", timing.boot.start),
        ("beginning", timing.start),
    )
    what, began_s = next((what, began_s) for what, began_s in stages if began_s)
    return f"{what}, {max(0.0, now_s - began_s):.1f} s into this stage"
