"""Is vLLM there for the engines that are started, does their name have an address, and do running ones take versions
from this run's hub?"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from meshrl.core.interpreter import finds
from meshrl.core.rpc.blocking_http import ask_blocking
from meshrl.inference.config import InferenceConfig
from meshrl.launch.preflight.findings import Finding, Plan, error, note, warning

ANSWER_DEADLINE_S = 3.0


def check_vllm(plan: Plan) -> Iterator[Finding]:
    engines = [(part.python, part.config) for part in plan.parts if isinstance(part.config, InferenceConfig)]
    for python in {
        Path(python or sys.executable)
        for python, config in engines
        if config.engine == "vllm" and config.server.host not in plan.elsewhere
    }:
        if os.access(python, os.X_OK) and not finds(python, "vllm"):  # what is no program is reported by itself
            yield error(
                f"inference.engine is 'vllm', but {str(python)!r} has no vLLM; install it there (uv sync --extra vllm),"
                " give the interpreter of an environment that has it in inference.python, or leave inference.engine out"
            )


def check_url(plan: Plan) -> Iterator[Finding]:
    """The run's programs reach its engines by the name in inference.url."""
    url = None if plan.config.inference is None else plan.config.inference.url
    if url is None:
        return
    try:
        socket.getaddrinfo(urlsplit(url).hostname, None)
    except OSError as problem:
        text = f"the host of inference.url {url!r} has no address here ({problem.strerror}); correct the name"
        yield error(text) if plan.config.starts("rollout") else warning(f"{text}, unless the rollout services find it")


def check_engines(plan: Plan) -> Iterator[Finding]:
    """Asks each listed engine for its version, and whether it follows a hub."""
    urls = plan.config.running_engines
    if plan.config.inference is None and not urls:
        yield note("no engine is started or named: the run waits for those that are started for its weight hub")
    if urls and not plan.config.starts("weights"):
        hub = plan.config.orchestrator.services.weights
        yield note(f"the hub at {hub} runs already: it calls the engines of its own --engines, not {', '.join(urls)}")
        return
    answers = {url: _version(url) for url in urls}
    fixed = [url for url, answer in answers.items() if isinstance(answer, Mapping) and "hub" not in answer]
    alone = plan.config.inference is None and len(fixed) == len(urls)
    for url in fixed:
        text = f"engine {url} cannot take weight versions: it is no `inference` of meshrl, or an older one"
        if alone:
            yield error(
                f"{text}, so a run would be trained on rollouts of the weights that it was started with; start it with"
                " `inference`, or let rl start one with [inference]"
            )
        else:
            yield warning(f"{text}; nothing is sampled from it, take it out of orchestrator.client.base_url")
    for url, answer in answers.items():
        if isinstance(answer, str):
            yield warning(
                f"engine {url} does not answer yet ({answer}): the run waits for it; start it with `inference`, correct"
                " orchestrator.client.base_url, or let rl start one with [inference]"
            )
        elif answer.get("hub_is_there"):
            yield error(
                f"engine {url} follows the weight hub at {answer['hub']}, whose run is going on; wait for its end, or"
                " take another engine"
            )


def _version(url: str) -> Mapping[str, object] | str:
    try:
        status, answer = ask_blocking(f"{url}/version", deadline_s=ANSWER_DEADLINE_S)
    except OSError as problem:
        return str(problem)
    return answer if status == HTTPStatus.OK and isinstance(answer, dict) else {}
