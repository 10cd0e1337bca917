"""Runs side by side in one trainer: each becomes what it becomes alone, to the bit, whatever the others do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from many_runs import DEADLINE_S, JOINING, RUNS, SEQ_LEN, ManyRuns, batch, load, many_runs, trained
from meshrl.core.config import ConfigError
from meshrl.models.logprobs import PackedRow
from meshrl.trainer.runs.settings import RunSettings
from meshrl.training.learner import Learner, RunRows
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterSpec, Batch, LossSpec, OptimizerSpec, RunPhase, RunSpec, StartPoint, StepState
from polling import until
from tiny_qwen3 import save_tiny_qwen3

STEPS = 5
SAVING = {"ckpt": {"interval": 1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=48, num_hidden_layers=2, **shape)


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Each run as the only one of a trainer."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: asyncio.run(trained(load(model), folder / name, [name], STEPS))[name] for name in RUNS}


# --- bits -----------------------------------------------------------------------------------------------


async def test_each_of_eight_runs_becomes_what_it_becomes_alone_though_one_is_deleted_and_comes_again(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    assert len({weights.sum().item() for weights in alone.values()}) == len(RUNS)
    async with many_runs(load(model), tmp_path) as mesh:
        for name in sorted(RUNS, reverse=True):  # in another order than below
            await mesh.create(name)
        await until(lambda: any("batch 1 of main or" in wait.what for wait in mesh.waits.look(0.0)))

        async def delete() -> None:
            await mesh.train("wide", [1, 2, 3])
            await mesh.submit("wide", 4)
            await mesh.host.delete("wide")

        others = [name for name in RUNS if name != "wide"]
        await asyncio.gather(delete(), *(mesh.train(name, range(1, STEPS + 1)) for name in others))
        with pytest.raises(MeshError, match="no run 'wide' here"):
            mesh.table.find("wide")
        assert mesh.publishing.retired == ["wide"]
        assert not (tmp_path / "runs/wide").exists()
        assert {name: bool(torch.equal(mesh.weights(name), alone[name])) for name in others} == dict.fromkeys(
            others, True
        )
        await mesh.create("wide")
        await mesh.train("wide", range(1, STEPS + 1))
        assert torch.equal(mesh.weights("wide"), alone["wide"])


async def test_a_trainer_that_starts_again_brings_each_run_back_at_its_durable_step(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        for name in RUNS:
            await mesh.create(name, {"ckpt": {"interval": 2}}, request_id=f"asked for {name}")
        await asyncio.gather(*(mesh.train(name, [1, 2, 3]) for name in RUNS))
        await mesh.host.suspend("odd", "to look at it")
    async with many_runs(load(model), tmp_path) as mesh:
        await mesh.host.bring_back()
        infos = {queue.book.run_id: mesh.host.info(queue) for queue in mesh.table}
        assert list(infos) == ["main", *RUNS]
        assert {infos[name].durable_step for name in RUNS} == {3}
        assert {infos[name].epoch for name in RUNS} == {2}
        assert {name for name in RUNS if infos[name].phase is RunPhase.SUSPENDED} == {"odd"}
        assert sorted(path.name for path in (tmp_path / "runs/odd").iterdir()) == ["checkpoints", "epoch", "weights"]
        await mesh.create("wide", SAVING, request_id="asked for wide")  # it is there: the answer was lost
        with pytest.raises(MeshError, match="holds run 'wide' already"):
            await mesh.create("wide", SAVING, request_id="another request")
        await mesh.host.resume("odd")
        await asyncio.gather(*(mesh.train(name, range(4, STEPS + 1)) for name in RUNS))
        for name, weights in alone.items():
            assert torch.equal(mesh.weights(name), weights), name


def starting(mesh: ManyRuns, name: str, of: str, step: int | None = None, *, with_optimizer: bool) -> RunSettings:
    point = StartPoint(run_id=of, step=step, with_optimizer=with_optimizer)
    return mesh.host.settings_of(name, RunSpec(start_from=point))


async def test_a_run_that_starts_with_the_optimizer_of_another_becomes_what_that_becomes(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    def as_the_other(name: str, step: int) -> Batch:
        return replace(batch("dropped", step), run_id=name)

    async with many_runs(load(model), tmp_path) as mesh:
        await mesh.create("dropped", SAVING)
        await mesh.train("dropped", [1, 2, 3])
        await mesh.when(lambda: mesh.table.find("dropped").book.durable_step == 3)
        settings = starting(mesh, "fork", "dropped", 3, with_optimizer=True)
        made = await mesh.host.create("fork", settings.model_copy(update={"seed": 7}))
        assert (made.step, made.durable_step, made.spec and made.spec.start_from) == (
            3, 3, StartPoint(run_id="dropped", step=3, with_optimizer=True),
        )  # fmt: skip
        await mesh.host.delete("dropped")
        await mesh.submit("fork", 4, made=as_the_other("fork", 4))
        await mesh.until("fork", 4)
    async with many_runs(load(model), tmp_path) as mesh:  # what it started from is gone, and its own checkpoint is here
        await mesh.host.bring_back()
        assert mesh.table.find("fork").book.durable_step == 3
        for step in (4, 5):
            await mesh.submit("fork", step, made=as_the_other("fork", step))
        await mesh.until("fork", 5)
        assert torch.equal(mesh.weights("fork"), alone["dropped"])


async def test_a_run_starts_from_the_weights_of_another_alone(model: str, tmp_path: Path) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        await mesh.create("odd", SAVING)
        await mesh.train("odd", [1, 2])
        await mesh.when(lambda: mesh.table.find("odd").book.durable_step == 2)
        settings = starting(mesh, "fork", "odd", with_optimizer=False)
        assert settings.lora == RunSettings.model_validate(RUNS["odd"]).lora  # the adapter that the weights are of
        made = await mesh.host.create("fork", settings)
        assert (made.step, made.tokens) == (0, 0)
        assert torch.equal(mesh.weights("fork"), mesh.weights("odd"))
        with pytest.raises(MeshError, match="has checkpoints of steps 1, 2; save one with `meshrl run checkpoint odd`"):
            starting(mesh, "another", "odd", 9, with_optimizer=False)
        with pytest.raises(MeshError, match="run 'main' has no checkpoint; save one"):
            starting(mesh, "another", "main", with_optimizer=False)
        wide = settings.model_copy(update={"lora": RunSettings.model_validate(RUNS["wide"]).lora})
        with pytest.raises(MeshError, match="cannot start from a checkpoint"):
            await mesh.host.create("another", wide)


# --- rows of several runs in one pass -------------------------------------------------------------------


def near(found: torch.Tensor, wanted: torch.Tensor, name: str) -> bool:
    """Sums in another order differ in their last bits. AdamW makes more of those of small gradients (6e-6 of the
    largest weight was seen), and Muon still more (1.5e-4)."""
    within = {"sgd": 1e-6, "muon": 1e-3}.get(name, 1e-4)
    return bool((found - wanted).abs().max() <= within * wanted.abs().max())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The runs of each pass."""
    made: list[list[str]] = []
    pass_rows = Learner.pass_rows

    def noted(learner: Learner, parts: Sequence[RunRows]) -> None:
        made.append([part.run.run_id for part in parts])
        pass_rows(learner, parts)

    monkeypatch.setattr(Learner, "pass_rows", noted)
    return made


async def test_runs_that_share_passes_become_what_each_becomes_alone_across_a_restart_and_a_deletion(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor], passes: list[list[str]]
) -> None:
    others = [name for name in RUNS if name != "wide"]
    async with many_runs(load(model), tmp_path, joining=JOINING) as mesh:
        for name in RUNS:
            await mesh.create(name, SAVING)

        async def delete() -> None:
            await mesh.train("wide", [1, 2])
            await mesh.submit("wide", 3)
            await mesh.host.delete("wide")

        await asyncio.gather(delete(), *(mesh.train(name, [1, 2, 3]) for name in others))
        assert mesh.error is None
    async with many_runs(load(model), tmp_path, joining=JOINING) as mesh:
        await mesh.host.bring_back()
        await asyncio.gather(*(mesh.train(name, range(4, STEPS + 1)) for name in others))
        assert {name for name in others if not near(mesh.weights(name), alone[name], name)} == set()
    assert {name for runs in passes for name in runs} == set(RUNS)
    assert {name for runs in passes if len(runs) > 1 for name in runs} == set(RUNS) - {"dropped", "cosine"}  # dropout
    assert max(map(len, passes)) >= 4


@pytest.mark.parametrize("fault", ["not finite", "out of memory"])
async def test_a_shared_pass_that_fails_is_repeated_run_by_run_and_the_run_at_fault_alone_fails(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor], passes: list[list[str]], fault: str
) -> None:
    learner, gate, names = load(model), threading.Event(), ("grpo", "sgd", "small")
    async with many_runs(learner, tmp_path, joining=JOINING) as mesh:
        for name in names:
            await mesh.create(name)
        await asyncio.gather(*(mesh.train(name, [1]) for name in names))
        before = len(passes)

        def pass_row(module: torch.nn.Module, inputs: tuple[PackedRow]) -> None:
            if fault == "out of memory" and "grpo" in passes[-1] and before < len(passes) <= before + 4:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 PiB")

        learner.policy.register_forward_pre_hook(pass_row)
        held = asyncio.create_task(mesh.table.call(gate.wait))  # so that all batches come at once
        await mesh.submit("grpo", 2, advantage=float("nan") if fault == "not finite" else None)
        for name in ("sgd", "small"):
            await mesh.submit(name, 2)
        gate.set()
        await held
        await mesh.until("grpo", 2, StepState.FAILED)
        assert sorted(passes[before]) == sorted(names)
        assert sorted(runs[0] for runs in passes[before + 1 : before + 4]) == sorted(names)
        mesh.table.find("grpo").submit(batch("grpo", 2), "once more")
        await asyncio.gather(*(mesh.until(name, 2) for name in names))
        await asyncio.gather(*(mesh.train(name, range(3, STEPS + 1)) for name in names))
        assert {name for name in names if not near(mesh.weights(name), alone[name], name)} == set()


# --- one run fails, the others do not notice --------------------------------------------------------------


async def healthy(mesh: ManyRuns, alone: dict[str, torch.Tensor]) -> None:
    """The run beside the one that fails trains to its end, as if it were alone, and waits no longer for its turns."""
    await mesh.train("dropped", range(1, STEPS + 1))
    waited = [0]  # tokens that the other trains while this run has a slice to train
    for run_id, tokens, ready in mesh.turns:
        waited.append(0 if run_id == "dropped" or "dropped" not in ready else waited[-1] + tokens)
    assert max(waited) <= 2 * SEQ_LEN  # the other's quantum, and a slice
    assert torch.equal(mesh.weights("dropped"), alone["dropped"])
    assert mesh.error is None


async def test_bad_batches_fail_their_run_alone_which_is_suspended_after_three(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        for name in ("grpo", "dropped"):
            await mesh.create(name)
        await mesh.train("grpo", [1])
        before = mesh.weights("grpo")

        async def fail() -> None:
            for advantage in ("inf", "-inf", "nan"):
                await mesh.submit("grpo", 2, advantage=float(advantage))
                await mesh.when(lambda: mesh.table.find("grpo").book.idle)

        await asyncio.gather(fail(), healthy(mesh, alone))
        info = mesh.host.info(mesh.table.find("grpo"))
        assert info.update_time is not None  # of step 1
        assert info.phase is RunPhase.SUSPENDED
        assert info.suspension is not None
        assert info.suspension.reason == "STEP_FAILED"
        assert "3 steps in a row failed (max_failed_steps), the last with: step 2: loss nan" in info.suspension.message
        assert torch.equal(mesh.weights("grpo"), before)
        index = tmp_path / "runs" / "index.json"
        await until(lambda: "STEP_FAILED" in index.read_text(), DEADLINE_S)  # so that a restart finds it suspended
        with pytest.raises(MeshError, match="run 'grpo' is suspended: 3 steps in a row failed") as refused:
            mesh.table.find("grpo").submit(batch("grpo", 2), "again")
        assert refused.value.reason is Reason.RUN_SUSPENDED
        await mesh.host.resume("grpo")
        await mesh.train("grpo", range(2, STEPS + 1))
        assert torch.equal(mesh.weights("grpo"), alone["grpo"])


def break_next_update(mesh: ManyRuns, name: str) -> None:
    """The optimizer of a run fails once, with the first half of its weights written over."""
    state = mesh.trainings[name].state
    step = state.optimizer.step

    def fail(rate: float) -> None:
        state.optimizer.step = step
        with torch.no_grad():
            state.adapters.flat[: state.adapters.flat.numel() // 2] = 7.0
        raise RuntimeError("a kernel failed")

    state.optimizer.step = fail


async def test_an_optimizer_that_fails_has_its_run_alone_made_anew_from_its_checkpoint(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        for name in ("grpo", "dropped"):
            await mesh.create(name, SAVING)
        await mesh.train("grpo", [1, 2])
        await mesh.when(lambda: mesh.table.find("grpo").book.durable_step == 2)
        break_next_update(mesh, "grpo")
        watched = asyncio.create_task(mesh.until("grpo", 3, StepState.FAILED))
        await mesh.submit("grpo", 3)
        await asyncio.gather(healthy(mesh, alone), watched)
        await mesh.when(lambda: mesh.table.find("grpo").book.epoch == 2)
        await mesh.when(lambda: mesh.table.find("grpo").book.info().phase is RunPhase.ACTIVE)
        info = mesh.host.info(mesh.table.find("grpo"))
        assert (info.step, info.durable_step) == (2, 2)
        await mesh.train("grpo", range(3, STEPS + 1))
        assert torch.equal(mesh.weights("grpo"), alone["grpo"])


async def test_a_run_without_a_checkpoint_whose_optimizer_fails_is_suspended_and_resumed_at_its_start(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        for name in ("grpo", "dropped"):
            await mesh.create(name)
        await mesh.train("grpo", [1])
        break_next_update(mesh, "grpo")
        await mesh.submit("grpo", 2)
        _, why = await asyncio.gather(healthy(mesh, alone), suspended(mesh, "grpo"))
        assert why.startswith("STEP_FAILED: step 2: the optimizer failed in the midst of its step (a kernel failed)")
        info = await mesh.host.resume("grpo")
        assert (info.step, info.epoch) == (0, 2)
        await mesh.train("grpo", range(1, STEPS + 1))
        assert torch.equal(mesh.weights("grpo"), alone["grpo"])


async def suspended(mesh: ManyRuns, name: str) -> str:
    """Waits until a run is suspended; returns its reason and message."""
    book = mesh.table.find(name).book
    await mesh.when(lambda: book.suspension is not None)
    suspension = book.suspension
    assert suspension is not None
    return f"{suspension.reason}: {suspension.message}"


async def test_a_pass_out_of_memory_fails_its_step_alone(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    learner = load(model)
    async with many_runs(learner, tmp_path) as mesh:
        for name in ("grpo", "dropped"):
            await mesh.create(name)
        short = True

        def pass_row(module: torch.nn.Module, inputs: object) -> None:
            if short and mesh.trainings["grpo"].state.adapters.mounted:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 PiB")

        learner.policy.register_forward_pre_hook(pass_row)
        await mesh.submit("grpo", 1)
        await asyncio.gather(mesh.until("grpo", 1, StepState.FAILED), healthy(mesh, alone))
        short = False
        await mesh.submit("grpo", 1, advantage=1.0)
        await mesh.until("grpo", 1)


async def test_a_folder_that_cannot_be_written_suspends_its_run_alone(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        for name in ("grpo", "dropped"):
            await mesh.create(name, SAVING)
        blocked = tmp_path / "runs/grpo/checkpoints"
        blocked.write_text("not a folder")
        await mesh.submit("grpo", 1)
        _, why = await asyncio.gather(healthy(mesh, alone), suspended(mesh, "grpo"))
        assert why.startswith("CHECKPOINT_FAILED: the checkpoint of step 1: ")
        await mesh.when(lambda: mesh.table.find("dropped").book.durable_step == STEPS)
        blocked.unlink()
        await mesh.host.resume("grpo")
        await mesh.train("grpo", range(2, STEPS + 1))
        assert torch.equal(mesh.weights("grpo"), alone["grpo"])
        await mesh.when(lambda: mesh.table.find("grpo").book.durable_step == STEPS)


async def test_a_publication_that_stands_still_suspends_its_run_alone(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path, stall_s=0.5) as mesh:
        for name in ("grpo", "dropped"):
            await mesh.create(name)
        mesh.publishing.held.add("grpo")
        await mesh.submit("grpo", 1)
        await mesh.submit("grpo", 2)
        _, why = await asyncio.gather(healthy(mesh, alone), suspended(mesh, "grpo"))
        assert why.startswith("DEADLINE_PASSED: version 1 could not be published: nothing moved for 0.5 s")
        mesh.publishing.release("grpo")
        await mesh.host.resume("grpo")
        await mesh.until("grpo", 2)
        await mesh.train("grpo", range(3, STEPS + 1))
        assert torch.equal(mesh.weights("grpo"), alone["grpo"])


async def test_a_version_that_the_hub_refuses_suspends_its_run_alone_and_is_published_once_it_is_resumed(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        for name in ("grpo", "dropped"):
            await mesh.create(name)
        refusal = MeshError(Reason.STALE_EPOCH, "epoch 1 is over")
        mesh.publishing.refuse = lambda run_id, version: refusal if (run_id, version) == ("grpo", 2) else None
        await mesh.train("grpo", [1])
        await mesh.submit("grpo", 2)
        await mesh.submit("grpo", 3)
        _, why = await asyncio.gather(healthy(mesh, alone), suspended(mesh, "grpo"))
        assert why == "STALE_EPOCH: version 2 could not be published: STALE_EPOCH: epoch 1 is over"
        mesh.publishing.refuse = lambda run_id, version: None
        await mesh.host.resume("grpo")
        await mesh.until("grpo", 3)
        await mesh.train("grpo", range(4, STEPS + 1))
        assert torch.equal(mesh.weights("grpo"), alone["grpo"])


# --- creation ------------------------------------------------------------------------------------------------


async def test_runs_are_refused_beyond_the_limit_and_beyond_the_memory_with_the_numbers(
    model: str, tmp_path: Path
) -> None:
    async with many_runs(load(model), tmp_path, max_runs=2, room_bytes=200_000) as mesh:
        with pytest.raises(
            MeshError, match=r"run 'wide' takes 0\.5 MiB .* of 0\.2 MiB .* 0\.2 MiB are free; lower its"
        ) as no:
            await mesh.create("wide")
        assert no.value.reason is Reason.NO_ROOM_FOR_RUN
        await mesh.create("small")
        assert mesh.host.info(mesh.table.find("small")).adapter_bytes == mesh.host.used_bytes > 0
        with pytest.raises(MeshError, match="holds run 'small' already"):
            await mesh.create("small")
        await mesh.create("odd")
        with pytest.raises(MeshError, match="holds 2 runs beside its own, as many as it may") as full:
            await mesh.create("cosine")
        assert full.value.reason is Reason.RUN_LIMIT_REACHED
        await mesh.host.delete("odd")
        await mesh.create("cosine")
        with pytest.raises(MeshError, match="run 'main' is this trainer's own"):
            await mesh.host.delete("main")


async def test_a_run_whose_adapter_cannot_be_made_leaves_no_trace(
    model: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        with pytest.raises(MeshError, match="'wo' names no linear layer") as refused:
            await mesh.create("bad", {"lora": {"rank": 4, "target_modules": ["wo"]}})
        assert refused.value.reason is Reason.INVALID_REQUEST
        mesh.publishing.closed = True
        with pytest.raises(MeshError, match="no hub"):
            await mesh.create("dropped")
        mesh.publishing.closed = False
        await mesh.create("dropped")
        await healthy(mesh, alone)
        assert [queue.book.run_id for queue in mesh.table] == ["main", "dropped"]


def test_a_spec_has_the_own_runs_settings_for_what_it_leaves_out() -> None:
    own = RunSettings.model_validate({"lora": {"rank": 8}, "optim": {"lr": 2e-4}, "seed": 3})
    made = RunSettings.from_spec(
        RunSpec(
            adapter=AdapterSpec(rank=4, alpha=8.0, target_modules=("q_proj",), seed=11),
            optimizer=OptimizerSpec(type="sgd", momentum=0.5, max_grad_norm=0.0),
            loss=LossSpec(name="aipo", constants={"delta": 2.0}),
        ),
        own,
    )
    assert (made.lora.rank, made.optim.lr, made.optim.momentum, made.optim.max_norm) == (4, 2e-4, 0.5, None)
    assert (made.loss.delta, made.seed, made.adapter_seed) == (2.0, 3, 11)
    assert RunSettings.from_spec(made.spec, own).spec == made.spec
    with pytest.raises(MeshError, match=r"spec\.loss.*delta belongs to loss\.type aipo"):
        RunSettings.from_spec(RunSpec(loss=LossSpec(name="grpo", constants={"delta": 2.0})), own)


async def test_a_damaged_index_of_runs_is_named_with_what_to_do(model: str, tmp_path: Path) -> None:
    async with many_runs(load(model), tmp_path) as mesh:
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / "index.json").write_text("{")
        with pytest.raises(ConfigError, match=r"index\.json is damaged: .*; restore it, or delete it"):
            await mesh.host.bring_back()
