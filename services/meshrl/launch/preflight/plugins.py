"""Can environments and functions of the user's own be imported, and do their options fit?

A process of its own imports them and tries functions on made-up rollouts, since a module may print, fail or exit. A dry
run also loads all tasks.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from meshrl.core.config import ConfigError
from meshrl.core.config.schema import ReadTable, Table
from meshrl.core.config.shared import EnvConfig
from meshrl.environments.plugins import NAMESAKES, is_registered
from meshrl.launch.preflight.findings import Finding, Plan, Severity, error, note, warning

IMPORT_DEADLINE_S = 180.0
LOAD_DEADLINE_S = 900.0

Answer = tuple[Severity, str, Sequence[Sequence[str]]]
"""A finding, and the keys that it is about: the place of an environment's entry, and the key in the entry."""


def check_plugins(plan: Plan) -> list[Finding]:
    return asyncio.run(find_about_plugins(plan))


async def find_about_plugins(plan: Plan) -> list[Finding]:
    """Cancelled, it ends the process that imports."""
    found = [
        note(f"environment id {taskset!r} is {NAMESAKES[taskset]}")
        for taskset in dict.fromkeys(entry.id for entry in plan.config.local_environments)
        if taskset in NAMESAKES
    ]
    questions = _questions(plan)
    if not any(questions.values()):
        return found
    deadline_s = LOAD_DEADLINE_S if plan.config.dry_run else IMPORT_DEADLINE_S
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__,
        stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            said, complaints = await process.communicate(json.dumps(questions).encode())
    except TimeoutError:
        return [*found, warning(f"environments are not checked: to load them took longer than {deadline_s:g} s")]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answers = json.loads(said)
    except ValueError:  # a module ended the process
        last = complaints.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return [*found, error(f"environments cannot be imported: {last[0]}")]
    for severity, text, keys in answers:
        hosted = plan.config.local_environments
        places = [(*plan.config.place_of(hosted[int(place)].resolved_name), *key) for place, *key in keys]
        origins = [plan.config.origin_of(path) for path in places]
        named = (
            ".".join(path) + ("" if origin is None else f" from {origin}")
            for path, origin in zip(places, origins, strict=True)
        )
        found.append(Finding(severity=severity, text=f"{text} ({', '.join(named)})" if places else text))
    return found


def _questions(plan: Plan) -> dict[str, object]:
    config, loss, advantage = plan.config, plan.config.trainer.loss, plan.config.orchestrator.advantage
    return {
        "loss": {"import_path": loss.import_path, "kwargs": loss.kwargs}
        if config.starts("trainer") and loss.import_path
        else None,
        "advantage": {
            "import_path": advantage.import_path,
            "kwargs": advantage.kwargs,
            "group_size": plan.config.orchestrator.group_size,
        }
        if advantage.import_path
        else None,
        "environments": {
            "entries": [entry.model_dump(mode="json") for entry in config.local_environments],
            "harness": config.rollout.harness,
            "max_turns": config.rollout.max_turns,
            "load": config.dry_run,
        }
        # Nothing can be wrong with a taskset of ours without options.
        if any(config.dry_run or entry.args or not is_registered(entry.id) for entry in config.local_environments)
        else None,
    }


def answer(questions: ReadTable) -> Iterator[Answer]:
    if questions["loss"] is not None:
        yield from _tried("trainer.loss", partial(_try_loss, questions["loss"]))
    if questions["advantage"] is not None:
        yield from _tried("orchestrator.advantage", partial(_try_advantage, questions["advantage"]))
    if questions["environments"] is not None:
        yield from _about_environments(**questions["environments"])


def _about_environments(entries: list[Table], harness: str, max_turns: int | None, load: bool) -> Iterator[Answer]:
    from meshrl.rollout import hosting  # imports verifiers
    from meshrl.wire.types import Sampling

    for place, entry in enumerate(entries):
        config = EnvConfig.model_validate(entry)
        try:
            resolved = hosting.configured(config, harness=harness, max_turns=max_turns)
            if doubt := hosting.why_unrewarded(config.resolved_name, resolved):
                yield "warning", doubt, [(str(place), "id")]
            if not load:
                continue
            none = Sampling()
            hosted = hosting.load(config, model="", harness=harness, max_turns=max_turns, default_sampling=none)
        except hosting.EnvironmentOptionsError as problem:
            yield "error", str(problem), [(str(place), *key) for key in problem.keys]
        except ConfigError as problem:
            yield "error", str(problem), [(str(place), "id")]
        else:
            count = hosted.tasks.num_tasks
            number = "infinitely many tasks" if count is None else f"{count} task{'' if count == 1 else 's'}"
            yield "note", f"environment {hosted.name!r} can be loaded: {number}", ()


def _tried(key: str, attempt: Callable[[], str | None]) -> Iterator[Answer]:
    """`attempt` returns a doubt."""
    try:
        if doubt := attempt():
            yield "warning", doubt, ()
    except Exception as problem:  # noqa: BLE001  # the user's code may raise anything
        text = str(problem)  # ours names the key
        if not text.startswith(f"{key}."):
            text = f"{key}: its function, or the import of it, failed with {type(problem).__name__}: {problem}"
        yield "error", text, ()


def _try_loss(asked: Table) -> str | None:
    import torch

    from meshrl.algorithms.losses import LossInputs, load_custom_loss

    logprobs = torch.tensor([-1.0, -0.5, -2.0, -1.0, -0.5, -2.0], requires_grad=True)
    output = load_custom_loss(**asked, key="trainer.loss")(
        LossInputs(
            logprobs=logprobs,
            inference_logprobs=torch.tensor([-1.1, -0.5, -1.9, -1.1, -0.5, -1.9]),
            advantages=torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5, -0.5]),
            sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
            num_sequences=2,
        )
    )
    (gradient,) = torch.autograd.grad(output.per_token.sum(), logprobs)
    text = f"trainer.loss.import_path {asked['import_path']!r}: the gradient of two sequences of three tokens is"
    if not gradient.isfinite().all():
        raise ValueError(f"{text} {gradient.tolist()}; compute a finite loss")
    return None if gradient.any() else f"{text} 0; a loss is a function of sequence.logprobs"


def _try_advantage(asked: Table) -> str | None:
    from meshrl.algorithms.advantages import load_custom_advantage

    size = asked.pop("group_size")
    advantage = load_custom_advantage(**asked, key="orchestrator.advantage")
    advantage([float(place % 2) for place in range(size)], [3 + place for place in range(size)])
    return None


def main() -> None:
    """Modules that print get stderr for stdout."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    json.dump(list(answer(json.load(sys.stdin))), stdout)
    stdout.flush()


if __name__ == "__main__":
    main()
