"""All preflight checks, in the order in which their findings are shown."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from loguru import logger

from meshrl.core.config.report import indent
from meshrl.launch.preflight.engines import check_engines, check_url, check_vllm
from meshrl.launch.preflight.findings import Check, Finding, Plan
from meshrl.launch.preflight.machine import check_gpus, check_open_files, check_ports, check_wandb
from meshrl.launch.preflight.models import check_models
from meshrl.launch.preflight.plugins import check_plugins, find_about_plugins
from meshrl.launch.preflight.services import check_environments_elsewhere, check_hub, check_running_services
from meshrl.launch.preflight.storage import check_disk, check_resume_step, check_versions

CHECKS: tuple[Check, ...] = (
    check_models,
    check_resume_step,
    check_plugins,
    check_running_services,
    check_environments_elsewhere,
    check_hub,
    check_engines,
    check_url,
    check_vllm,
    check_gpus,
    check_ports,
    check_open_files,
    check_disk,
    check_versions,
    check_wandb,
)


def examine(plan: Plan, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Checks side by side; takes some seconds, mostly for the imports of environments."""
    with ThreadPoolExecutor(len(checks), thread_name_prefix="preflight") as pool:
        return [finding for found in pool.map(lambda check: list(check(plan)), checks) for finding in found]


def show(findings: Sequence[Finding]) -> None:
    for finding in findings:
        logger.log("WARNING" if finding.severity == "warning" else "INFO", "{}", finding.text)


class CheckBeside:
    """The check of environments, which takes longest, made while the first programs start."""

    def __init__(self, plan: Plan, findings: Sequence[Finding]) -> None:
        """`findings` are those of all other checks."""
        self._plan, self._findings = plan, findings
        self.problems: str | None = None

    async def __call__(self) -> bool:
        found = await find_about_plugins(self._plan)
        self.problems = refusal([*self._findings, *found])
        if self.problems is None:
            show(found)
        return self.problems is None


def refusal(findings: Sequence[Finding]) -> str | None:
    errors = [finding.text for finding in findings if finding.severity == "error"]
    if not errors:
        return None
    others = [f"{finding.severity}: {finding.text}" for finding in findings if finding.severity != "error"]
    if len(errors) == 1 and not others:
        return errors[0]
    return f"nothing was started; {len(errors)} problem(s) must be solved first\n{indent([*errors, *others])}"
