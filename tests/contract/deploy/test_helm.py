"""The Helm chart, rendered by Helm itself: golden manifests that Kubernetes takes, configurations that programs take.

MESHRL_WRITE_GOLDEN=1 writes the golden files anew.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest
import yaml

from meshrl.core.config import BaseConfig, load_config
from meshrl.inference.submission import InferenceProgramConfig
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.rollout.config import RolloutConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.weights.config import WeightsConfig

pytest.importorskip("helm_python", reason="helm-python-sdk has wheels for Linux on x86-64 alone")
from helm_python import Chart, HelmError, lint  # after the look whether it is there

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "meshrl"
GOLDEN = ROOT / "tests" / "golden" / "helm"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
VERSIONS = ("1.31", "1.37")  # the oldest that is tested, and the newest there is a schema of
OTHERS = {  # kinds that are not Kubernetes' own: the fields of their spec that the chart may use
    "JobSet": {"network", "failurePolicy", "replicatedJobs"},
    "LeaderWorkerSet": {"replicas", "leaderWorkerTemplate"},
    "ServiceMonitor": {"selector", "endpoints"},
    "Certificate": {
        "secretName",
        "duration",
        "renewBefore",
        "privateKey",
        "usages",
        "uris",
        "dnsNames",
        "issuerRef",
    },
}
PROGRAMS: dict[str, type[BaseConfig]] = {
    "orchestrator": OrchestratorConfig,
    "rollout": RolloutConfig,
    "weights": WeightsConfig,
    "trainer": TrainerConfig,
    "inference": InferenceProgramConfig,
}


def values_of(example: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text())
    return read


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def rendered(chart: Chart) -> dict[str, list[dict[str, Any]]]:
    """The manifests of each example."""
    found = {}
    for example in EXAMPLES:
        files = chart.render(values_of(example), name="run", namespace="training")
        texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
        found[example] = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]
    return found


def pods(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The specs of all pods that the manifests make."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "StatefulSet" | "Deployment" | "Job":
                yield spec["template"]["spec"]
            case "JobSet":
                yield spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            case "LeaderWorkerSet":
                yield spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
                yield spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]


@pytest.mark.parametrize("example", [None, *EXAMPLES])
def test_lint_has_nothing_to_say(example: str | None) -> None:
    report = lint(CHART, {} if example is None else values_of(example), strict=True, kube_version="v1.31.0")
    assert report["errors"] == []
    assert report["messages"] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_rendered_as_its_golden_file(example: str, rendered: dict[str, list[dict[str, Any]]]) -> None:
    golden = GOLDEN / f"{example}.yaml"
    found = yaml.safe_dump_all(rendered[example], sort_keys=True, width=160)
    if os.environ.get("MESHRL_WRITE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.fixture(scope="module")
def _schemas_are_read_once() -> Iterator[None]:
    """The validator reads the file of a kind anew for each manifest, which takes a second on a slow machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@pytest.mark.usefixtures("_schemas_are_read_once")
@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_takes_every_manifest(example: str, rendered: dict[str, list[dict[str, Any]]]) -> None:
    for manifest in rendered[example]:
        if manifest["kind"] in OTHERS:
            assert manifest["spec"].keys() <= OTHERS[manifest["kind"]]
            specs = [
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod} for pod in pods([manifest])
            ]
        else:
            specs = [manifest]
        for spec, version in product(specs, VERSIONS):
            kubernetes_validate.validate(spec, version, strict=True)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_pod_is_locked_down(example: str, rendered: dict[str, list[dict[str, Any]]]) -> None:
    for spec in pods(rendered[example]):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted - {volume["name"] for volume in spec["volumes"]} <= {"outputs"}  # by a claim template
    text = yaml.safe_dump(rendered[example])
    assert "ReadWriteMany" not in text
    assert ":latest" not in text


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_program_takes_the_configuration_that_it_is_given(
    example: str, rendered: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    maps = [each["data"] for each in rendered[example] if each["kind"] == "ConfigMap"]
    loaded = {}
    for data in maps:
        ((file, text),) = data.items()
        (tmp_path / file).write_text(text)
        program = file.removesuffix(".toml")
        argv = ["@", str(tmp_path / file), "--server.host", "0.0.0.0"]
        config: Any = load_config(PROGRAMS[program], argv, prog=program, environ={})
        assert config.notes == ()
        assert config.server.insecure is not values_of(example).get("tls", {}).get("enabled", False)
        loaded[program] = config
    if "orchestrator" in loaded:
        hosted = {env.resolved_name for env in loaded["rollout"].env}
        assert {env.resolved_name for env in loaded["orchestrator"].train.env} <= hosted
        assert loaded["orchestrator"].services.weights == loaded["rollout"].weights == "run-weights:50053"


def test_a_remote_site_has_engines_and_no_service(rendered: dict[str, list[dict[str, Any]]]) -> None:
    kinds = [manifest["kind"] for manifest in rendered["remote-site"]]
    assert sorted(kinds) == ["ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "StatefulSet"]
    (config,) = (each["data"] for each in rendered["remote-site"] if each["kind"] == "ConfigMap")
    address = tomllib.loads(config["inference.toml"])["weight_broadcast"]["address"]
    assert address == "weights.training.internal:50053"


def test_certificates_name_role_and_run_and_reach_the_pods_of_their_component_alone(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    manifests = rendered["watched"]
    made = {each["spec"]["secretName"]: each["spec"] for each in manifests if each["kind"] == "Certificate"}
    assert made["run-weights-tls"]["uris"] == ["spiffe://meshrl/reverse/hub/run-weights"]
    assert made["run-inference-tls"]["dnsNames"] == [
        "agent.meshrl", "run-inference.training.svc", "*.run-inference.training.svc",
    ]  # fmt: skip
    for spec in pods(manifests):
        (container,) = spec["containers"]
        secrets = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
        assert secrets == [f"run-{container['name']}-tls"]
        named = {each["name"]: each.get("value", "") for each in container["env"]}
        assert named["MESHRL_TLS_CERT"] == "/etc/meshrl-tls/tls.crt"
        assert container["livenessProbe"].keys() & {"exec", "httpGet"}  # Kubernetes' own gRPC probes know no TLS
        if container["name"] == "inference":
            assert "https://$(POD_NAME).run-inference.training.svc:8000" in container["args"]
            assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_pods_of_a_remote_site_join_the_run_by_the_token_of_their_role(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    (spec,) = pods(rendered["remote-site"])
    (container,) = spec["containers"]
    assert "meshrl join weights.training.internal:50060 --ca-hash sha256:333" in container["command"][2]
    (token,) = (each for each in container["env"] if each["name"] == "MESHRL_JOIN_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "meshrl-join", "key": "inference"}}


BAD = {
    "trainer.replicas": 0,
    "trainer.kind": "deployment",
    "trainer.gpu.count": -1,
    "trainer.gpu.resource": "gpu",
    "trainer.replica": 2,
    "trainer.terminationGracePeriodSeconds": "soon",
    "inference.kind": "jobset",
    "inference.autoscaling.maxReplicas": 0,
    "inference.size": 1.5,
    "inference.env": [{"value": "no name"}],
    "rollout.replicas": -1,
    "weights.storage.size": "a lot",
    "orchestrator.enabled": "yes",
    "orchestrator.resources.limits.cpu": "many",
    "config.maxSteps": 0,
    "config.orchestrator.train.env": [],
    "config.model.name": "",
    "config.secrets.token": "hf_x",
    "image.pullPolicy": "Sometimes",
    "image.gpu.tag": "latest",
    "image.cpu.digest": "sha256:1",
    "external.weights": "hub without a port",
    "securityContext.runAsUser": 0,
    "kueue.queueName": "Training!",
    "tls.secrets.engine": "mine",
    "tls.issuer.kind": "Authority",
    "tls.join.caHash": "3333",
    "replicas": 3,
}


@pytest.mark.parametrize("key", sorted(BAD))
def test_a_bad_value_is_refused_by_name(chart: Chart, key: str) -> None:
    values: Any = BAD[key]
    for part in reversed(key.split(".")):
        values = {part: values}
    with pytest.raises(HelmError) as refused:
        chart.validate_schema(values)
    parts = key.split(".")
    said = str(refused.value)
    assert "/".join(parts) in said or ("/".join(parts[:-1]) in said and parts[-1] in said), said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tls": {"enabled": True, "join": {"address": "hub:50060"}}}, r"tls\.join\.address: .* weights\.enabled"),
        (
            {"weights": {"enabled": False}, "external": {"weights": "hub:1"},
             "tls": {"enabled": True, "join": {"address": "hub:50060"}}},
            r"tls\.join: address goes with caHash and secret",
        ),
    ],
)  # fmt: skip
def test_pods_that_join_need_a_hub_elsewhere_and_a_token(chart: Chart, values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError, match=said):
        chart.render(values, name="run")


def test_checkpoints_of_several_pods_need_a_folder_that_they_share(chart: Chart) -> None:
    with pytest.raises(HelmError, match=r"config\.trainer\.ckpt: each of the trainer's pods would keep its own piece"):
        chart.render({"trainer": {"replicas": 2}, "config": {"trainer": {"ckpt": {"interval": 5}}}}, name="run")
