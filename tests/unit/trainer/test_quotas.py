"""What a tenant may train in a day, how many runs it may have, and its name at what it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from many_runs import load, many_runs
from meshrl.client.trust import Role, Scope
from meshrl.core.config import ConfigError
from meshrl.core.rpc.guard import CALLER, Caller
from meshrl.trainer.runs.quotas import DAY_S, Quotas
from meshrl.trainer.service import TrainerServicer
from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire.errors import MeshError, Reason
from tiny_qwen3 import save_tiny_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=48, num_hidden_layers=1, **shape)


@pytest.fixture
def tenant() -> Iterator[Caller]:
    caller = Caller(role=Role.TENANT, name="x", account="t1", scope=Scope(runs=("a-*",), tokens_per_day=100))
    before = CALLER.set(caller)
    yield caller
    CALLER.reset(before)


async def test_a_tenant_trains_its_tokens_of_a_day_across_a_restart_and_more_the_next_day(
    tmp_path: Path, tenant: Caller
) -> None:
    now_s, file = 5.25 * DAY_S, tmp_path / "runs" / "quotas.json"
    quotas = Quotas(file, lambda: now_s)
    for tokens in (60, 30):
        quotas.check(tokens)
        await quotas.charge(tokens)
    again = Quotas(file, lambda: now_s)
    again.check(10)
    with pytest.raises(
        MeshError, match=r"may train 100 tokens a day .*, has trained 90 today, .* 11; .* 18\.0 hours"
    ) as no:
        again.check(11)
    assert (no.value.reason, no.value.retry_after_s) == (Reason.OVERLOADED, 0.75 * DAY_S)
    now_s += 0.75 * DAY_S
    again.check(100)
    await again.charge(100)
    with pytest.raises(MeshError, match="has trained 100 today"):
        again.check(1)


def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "quotas.json").write_text('{"day": 1')
    with pytest.raises(ConfigError, match=r"quotas\.json is damaged: .*; restore it, or delete it"):
        Quotas(tmp_path / "quotas.json")


async def test_callers_without_a_quota_are_not_counted(tmp_path: Path) -> None:
    quotas = Quotas(tmp_path / "quotas.json")
    quotas.check(10**12)
    await quotas.charge(10**12)
    assert not (tmp_path / "quotas.json").exists()


async def test_a_suspension_names_the_caller(model: str, tmp_path: Path, tenant: Caller) -> None:
    nothing: Any = None
    async with many_runs(load(model), tmp_path) as mesh:
        await mesh.create("small")
        servicer = TrainerServicer(mesh.table, nothing, on_drained=lambda: None)
        servicer.host = mesh.host
        answer = await servicer.SuspendRun(pb.SuspendRunRequest(run_id="small", message="to look at it"), None)
        assert (answer.run.suspension.message, answer.run.suspension.by) == ("to look at it", "tenant/x")


async def test_a_tenant_has_so_many_runs_also_after_a_restart(model: str, tmp_path: Path) -> None:
    quota = {"account": "t1", "most": 1}
    async with many_runs(load(model), tmp_path) as mesh:
        await mesh.create("small", request_id="r1", **quota)
        await mesh.create("small", request_id="r1", **quota)  # the same request again
        await mesh.create("odd", account="t2", most=1)
    async with many_runs(load(model), tmp_path) as mesh:
        await mesh.host.bring_back()
        with pytest.raises(
            MeshError, match=r"token t1 may have 1 runs \(--max-runs\) and has 'small'; delete one"
        ) as no:
            await mesh.create("sgd", **quota)
        assert no.value.reason is Reason.RUN_LIMIT_REACHED
        await mesh.host.delete("small")
        await mesh.create("sgd", **quota)
