"""Do the services that run already answer, and is no other hub at work in the output folder?"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.client import RolloutClient, TrainerClient, WeightSyncClient
from meshrl.client.credentials import default_credentials
from meshrl.core.orphans import is_locked
from meshrl.launch.preflight.findings import Finding, Plan, error, note, warning
from meshrl.v1 import rollout_pb2, rollout_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.types import CONTRACT_VERSION, EnvironmentInfo

HEALTH_DEADLINE_S = 5.0
CLIENTS = {"rollout": RolloutClient, "trainer": TrainerClient, "weights": WeightSyncClient}
_OPTIONS = [("grpc.enable_http_proxy", 0)]


def check_running_services(plan: Plan) -> Iterator[Finding]:
    given = plan.config.orchestrator.services.given()
    for program, address in ((program, address) for program, several in given.items() for address in several):
        key = f"orchestrator.services.{program} {address!r}"
        client = CLIENTS[program]
        try:
            with default_credentials().open_blocking_channel(address, _OPTIONS, client.server_role) as channel:
                request = health_pb2.HealthCheckRequest(service=client.service)
                health = health_pb2_grpc.HealthStub(channel)
                status = int(health.Check(request, timeout=HEALTH_DEADLINE_S, wait_for_ready=True).status)
        except grpc.RpcError as problem:
            text = f"{key}: {_explained(problem, client.service)}"
            others = len(given[program]) > 1 or plan.config.starts(program)
            yield warning(f"{text}; the others are used until it serves") if others else error(text)
            continue
        if status != health_pb2.HealthCheckResponse.SERVING:
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            yield note(f"{key} answers {name}: the run begins once it serves")


def check_environments_elsewhere(plan: Plan) -> Iterator[Finding]:
    """A dry run asks a running rollout service for the environments that it hosts."""
    addresses = plan.config.orchestrator.services.given().get("rollout")
    if addresses is None or not plan.config.dry_run:
        return
    local = {entry.resolved_name for entry in plan.config.local_environments}
    hosted: dict[str, dict[str, str]] = {}
    for address in addresses:
        key = f"orchestrator.services.rollout {address!r}"
        try:
            hosted[key] = _environments(address)
        except grpc.RpcError:
            yield note(f"{key}: it did not list its environments, which are loaded there and not here")
    for name in (entry.resolved_name for entry in plan.config.rollout.env):
        at = [key for key, environments in hosted.items() if name in environments]
        yield from (note(f"environment {name!r} is loaded by {key}: {hosted[key][name]}") for key in at)
        if at or name in local or len(hosted) < len(addresses):
            continue
        have = "; ".join(f"{key} has {', '.join(sorted(known)) or 'none'}" for key, known in hosted.items())
        yield error(f"no rollout service hosts environment {name!r}: {have}; host it there, or correct its name")


def check_hub(plan: Plan) -> Iterator[Finding]:
    """A hub that was started by hand may be at work in the folder."""
    if plan.folder_in_use or not plan.config.starts("weights"):
        return
    folder = plan.config.weights.spool_dir or plan.config.output_dir / "weight_hub"
    if is_locked(str(folder / "decisions.sqlite-lock")):
        yield error(
            f"weights.spool_dir: another hub is at work in {folder}; stop it, choose another output_dir, or use it with"
            " orchestrator.services.weights"
        )


def _environments(address: str) -> dict[str, str]:
    credentials = default_credentials()
    with credentials.open_blocking_channel(address, _OPTIONS, RolloutClient.server_role) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        request = rollout_pb2.ListEnvironmentsRequest(contract_version=CONTRACT_VERSION)
        answer = stub.ListEnvironments(
            request, timeout=HEALTH_DEADLINE_S, wait_for_ready=True, metadata=credentials.metadata()
        )
    infos = [convert.from_proto(EnvironmentInfo, environment) for environment in answer.environments]
    return {info.name: f"{'infinitely many' if info.num_tasks is None else info.num_tasks} tasks" for info in infos}


def _explained(problem: grpc.RpcError, service: str) -> str:
    code = problem.code() if isinstance(problem, grpc.Call) else None
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"nobody answered within {HEALTH_DEADLINE_S:g} s; start it first, or correct the address"
    if code is grpc.StatusCode.NOT_FOUND:
        return f"the server there has no {service}; correct the address"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "the server there does not say whether it is well; it needs the service grpc.health.v1.Health"
    return f"{problem}; start it first, or correct the address"
