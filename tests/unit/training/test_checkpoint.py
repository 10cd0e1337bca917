"""Checkpoints of one process: saves change nothing, folders are whole or absent, old ones go, wrong ones refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import checkpoint_kit as kit
from loss_curves import stream_batch
from meshrl.models.lora import adapter_state, peft_state
from meshrl.models.state import gather_state
from meshrl.training.checkpoints import files
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.config import CheckpointConfig, SnapshotConfig, TrainingConfig
from meshrl.training.learner import StepError
from meshrl.training.start import open_checkpoints
from meshrl.versions import peft
from meshrl.wire.saved_steps import pin_step, steps_in, unpin_step

EVERY = [1, 2, 3, 4, 5, 6]
LORA = {"lora": {"rank": 4, "dropout": 0.2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.save_model(tmp_path_factory.mktemp("model"))


def saved_steps(output_dir: Path) -> list[int]:
    return steps_in(output_dir / "checkpoints")


def test_a_save_changes_nothing_in_training(model: str, tmp_path: Path) -> None:
    expected = kit.train(kit.build(model, LORA), 4)
    saving = kit.build(model, LORA)
    checkpointer = Checkpointer(*saving, tmp_path, tokenizer=None)
    got = []
    for step in range(1, 5):
        got += kit.train(saving, step)
        checkpointer.save_as(CheckpointConfig(save_async=step % 2 == 0))
    checkpointer.wait_for_save()
    assert got == expected
    assert saved_steps(tmp_path) == [1, 2, 3, 4]


def test_a_snapshot_in_the_background_is_the_same(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    kit.train(trained, 3)
    for name, in_background in (("now", False), ("later", True)):
        checkpointer = Checkpointer(*trained, tmp_path / name, tokenizer=None)
        checkpointer.save_as(CheckpointConfig(save_async=in_background))
        checkpointer.wait_for_save()
    now, later = (load_file(tmp_path / name / "weights/step_3/model.safetensors") for name in ("now", "later"))
    kit.assert_same(now, later)


def test_the_snapshot_is_a_hugging_face_folder_of_the_trained_weights(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    kit.train(trained, 2)
    folder = Checkpointer(*trained, tmp_path, tokenizer=None, snapshot_dtype=torch.bfloat16).save(weights_only=True)
    assert folder == tmp_path / "weights" / "step_2"
    assert not (tmp_path / "checkpoints").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    kit.assert_same(gather_state(loaded), gather_state(trained.model, torch.bfloat16))


def test_adapters_are_merged_and_also_written_on_their_own(model: str, tmp_path: Path) -> None:
    trained = kit.build(model, LORA)
    kit.train(trained, 2)
    ckpt = CheckpointConfig(weights=SnapshotConfig(save_adapter_separately=True))
    config = TrainingConfig(model=kit.model_config(model, LORA), ckpt=ckpt, output_dir=tmp_path)
    folder = open_checkpoints(config, trained.learner, trained.run, None).save(weights_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    kit.assert_same(gather_state(loaded), gather_state(trained.model))
    _, adapters = peft.read_folder(folder / "lora_adapters")
    kit.assert_same(adapters, peft_state(adapter_state(trained.model)))


def test_a_big_snapshot_is_split_into_files(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.training.checkpoints.weights_folder.MAX_FILE_SIZE", "20KB")
    trained = kit.build(model)
    folder = Checkpointer(*trained, tmp_path, tokenizer=None).save(weights_only=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    kit.assert_same(gather_state(AutoModelForCausalLM.from_pretrained(folder)), gather_state(trained.model))


# --- whose folder a checkpoint is -------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_new_run_replaces_what_an_earlier_one_left_at_the_same_step(
    model: str, tmp_path: Path, weights_only: bool
) -> None:
    for steps in (1, 2):
        trained = kit.build(model)
        kit.train(trained, steps)
        trained.run.step_done = 5
        Checkpointer(*trained, tmp_path, tokenizer=None).save(weights_only=weights_only)
    kit.assert_same(load_file(tmp_path / "weights/step_5/model.safetensors"), gather_state(trained.model))
    if not weights_only:
        resumed = kit.build(model)
        Checkpointer(*resumed, tmp_path, tokenizer=None).restore(5)
        kit.assert_same(kit.state(resumed), kit.state(trained))


def test_the_same_step_of_a_run_is_written_once(model: str, tmp_path: Path) -> None:
    checkpointer = Checkpointer(*kit.build(model), tmp_path, tokenizer=None)
    folder = checkpointer.save()
    written = (folder / files.MANIFEST).stat().st_mtime_ns
    assert checkpointer.save() == folder
    assert (folder / files.MANIFEST).stat().st_mtime_ns == written


def test_going_back_sets_later_checkpoints_aside(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    for step in (2, 4, 6):
        kit.train(trained, step)
        checkpointer.save()
    back = kit.build(model)
    Checkpointer(*back, tmp_path, tokenizer=None).restore(2)
    assert Checkpointer(*kit.build(model), tmp_path, tokenizer=None).restore(-1) == 2, "or a crash would bring back 6"
    assert (tmp_path / "checkpoints" / "superseded_step_6" / "trainer" / files.MANIFEST).is_file()
    assert steps_in(tmp_path / "weights") == [2], "or eval would score steps that this run never reached"
    assert (tmp_path / "weights" / "superseded_step_6" / "model.safetensors").is_file()


# --- pruning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "left"),
    [(None, None, EVERY), (None, 2, EVERY), (2, None, [5, 6]), (1, 2, [2, 4, 6]), (9, 2, EVERY)],
)
def test_the_newest_and_multiples_stay(keep_last: int | None, keep_interval: int | None, left: list[int]) -> None:
    surplus = files.surplus(EVERY, keep_last=keep_last, keep_interval=keep_interval, pinned=())
    assert sorted(set(EVERY) - surplus) == left


def test_old_checkpoints_go(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    config = CheckpointConfig(keep_last=2, keep_interval=3, save_async=True)
    for step in EVERY:
        trained.run.step_done = step
        (tmp_path / f"checkpoints/step_{step}/orchestrator").mkdir(parents=True)
        checkpointer.save_as(config)
    checkpointer.wait_for_save()
    assert saved_steps(tmp_path) == steps_in(tmp_path / "weights") == [3, 5, 6]
    assert [step for step in (3, 5, 6) if not (tmp_path / f"checkpoints/step_{step}/orchestrator").is_dir()] == []


def test_snapshots_do_not_push_out_the_newest_checkpoint(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    trained.run.step_done = 1
    checkpointer.save()
    for trained.run.step_done in (2, 3):
        checkpointer.save(weights_only=True)
        checkpointer.prune(CheckpointConfig(keep_last=1))
    assert saved_steps(tmp_path) == [1]
    assert steps_in(tmp_path / "weights") == [1, 3]


def test_a_pinned_step_stays_until_it_is_free_again(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    for trained.run.step_done in (1, 2, 3):
        checkpointer.save_as(CheckpointConfig(keep_last=1))
        if trained.run.step_done == 1:
            pin_step(tmp_path / "weights", 1)
    assert saved_steps(tmp_path) == steps_in(tmp_path / "weights") == [1, 3]
    unpin_step(tmp_path / "weights", 1)
    checkpointer.prune(CheckpointConfig(keep_last=1))
    assert saved_steps(tmp_path) == steps_in(tmp_path / "weights") == [3]


def test_another_programs_part_of_a_step_is_left_alone(model: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_1/orchestrator").mkdir(parents=True)
    trained = kit.build(model)
    trained.run.step_done = 2
    Checkpointer(*trained, tmp_path, tokenizer=None).save_as(CheckpointConfig(keep_last=1))
    assert (tmp_path / "checkpoints/step_1/orchestrator").is_dir()


def test_a_restored_run_has_no_gradient_of_the_weights_before(model: str, saved: Path) -> None:
    trained = kit.build(model)
    trained.pass_rows(stream_batch(1, dp_size=1, vocab_size=kit.VOCAB))
    Checkpointer(*trained, saved, tokenizer=None).restore(3)
    assert all(parameter.grad is None for parameter in trained.model.parameters())
    with pytest.raises(StepError, match="step 4: run 'main' has no gradient to step with"):
        trained.learner.optim_step(trained.run)


# --- what cannot be resumed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_once(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained = kit.build(model)
    for step in (3, 6):
        kit.train(trained, step)
        Checkpointer(*trained, folder, tokenizer=None).save()
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """An output folder with checkpoints of steps 3 and 6, to be damaged at will."""
    return Path(shutil.copytree(saved_once, tmp_path / "saved"))


@pytest.mark.parametrize("step", [-1, 3])
def test_without_a_checkpoint_the_error_says_what_to_set(model: str, tmp_path: Path, step: int) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; without ckpt.resume_step"):
        Checkpointer(*kit.build(model), tmp_path, tokenizer=None).restore(step)


def test_a_missing_step_is_told_with_those_there_are(model: str, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step 5.*holds steps \[3, 6\]"):
        Checkpointer(*kit.build(model), saved, tokenizer=None).restore(5)


def _cut(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def _say(name: str, value: object) -> Callable[[Path], object]:
    """Another value in the manifest, as somebody's editor or a flipped bit would leave it."""

    def change(folder: Path) -> None:
        path = folder / files.MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return change


def _swap(folder: Path) -> None:
    """The checkpoint of step 3 under the name of step 6."""
    shutil.rmtree(folder)
    shutil.copytree(folder.parent.parent / "step_3" / folder.name, folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_say("tokens", 16), r"checkpoint.json does not have the checksum it was written with"),
        (_say("step", 7), r"checkpoint.json does not have the checksum it was written with"),
        (_swap, r"step_6/trainer holds the checkpoint of step 3, not of step 6; give its folder the name step_3 back"),
        (_cut, r"__0_0.distcp has \d+ bytes instead of"),
        (_flip, r"__0_0.distcp does not have the checksum"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata cannot be read"),
        (lambda folder: (folder / "random_00000.safetensors").unlink(), r"random_00000.* cannot be read"),
        (lambda folder: (folder / files.MANIFEST).write_text("{"), r"checkpoint.json cannot be read"),
        (lambda folder: (folder / files.MANIFEST).write_text("[]"), r"checkpoint.json cannot be read"),
        (lambda folder: (folder / files.MANIFEST).write_text('{"format": "other-3"}'), r"written in format 'other-3'"),
        (lambda folder: (folder / files.MANIFEST).unlink(), r"has no checkpoint.json, so it is not a checkpoint"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_refused_and_an_earlier_one_resumes(
    model: str, saved: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(saved / "checkpoints/step_6/trainer")
    trained = kit.build(model)
    before = kit.state(trained)
    with pytest.raises(CheckpointError, match=said):
        Checkpointer(*trained, saved, tokenizer=None).restore(-1)
    kit.assert_same(kit.state(trained), before)
    assert Checkpointer(*trained, saved, tokenizer=None).restore(3) == 3


def test_no_flipped_bit_of_the_manifest_changes_what_is_read(saved: Path) -> None:
    folder = saved / "checkpoints/step_6/trainer"
    path, chance, read = folder / files.MANIFEST, random.Random(0), []
    whole, written = files.CheckpointContents.read(folder, step=6), path.read_bytes()
    for _ in range(150):
        data, bit = bytearray(written), chance.randrange(8 * len(written))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            found = files.CheckpointContents.read(folder, step=6)
        except CheckpointError:
            continue
        if found != whole:
            read.append((bit, found))
    assert read == []


def test_a_manifest_from_before_there_was_a_checksum_resumes(model: str, saved: Path) -> None:
    path = saved / "checkpoints/step_6/trainer" / files.MANIFEST
    values = json.loads(path.read_text())
    del values[files.CHECKSUM]
    path.write_text(json.dumps(values))
    assert Checkpointer(*kit.build(model), saved, tokenizer=None).restore(-1) == 6


@pytest.mark.parametrize(
    ("settings", "optim", "changed", "said"),
    [
        (LORA, {}, {}, r"is for a model without .*lora_A.*model.lora"),
        ({"dtype": "float32"}, {"type": "muon"}, {}, r"optimizer AdamW, this run has AdamW\+Muon; set optim.type"),
        ({}, {}, {"intermediate_size": 64}, r"gate_proj.weight is torch.float32 \(48, 32\) there, and .*\(64, 32\)"),
        ({}, {}, {"num_hidden_layers": 1}, r"holds model.layers.1.*which this model has not.*model.name"),
        ({}, {}, {"num_hidden_layers": 3}, r"is for a model without model.layers.2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    saved: Path, tmp_path: Path, settings: dict[str, Any], optim: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    trained = kit.build(kit.save_model(tmp_path / "other", **changed), settings, optim)
    before = kit.state(trained)
    with pytest.raises(CheckpointError, match=said):
        Checkpointer(*trained, saved, tokenizer=None).restore(-1)
    kit.assert_same(kit.state(trained), before)


# --- disks and processes that fail ------------------------------------------------------------------


def test_a_disk_that_cannot_be_written_is_an_error_and_leaves_nothing(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"could not start a checkpoint .*a disk with room"):
        checkpointer.save()
    (tmp_path / "checkpoints").unlink()
    assert list(tmp_path.glob("weights/*")) == []
    checkpointer.save()
    assert saved_steps(tmp_path) == [0]


def test_a_failure_in_the_background_is_raised_at_the_next_look(model: str, tmp_path: Path) -> None:
    trained = kit.build(model)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    trained.run.step_done = 1
    checkpointer.save()
    trained.run.step_done = 2
    (tmp_path / "checkpoints/step_2").write_text("a file where a folder should be")
    heard: list[int] = []
    checkpointer.save(in_background=True, on_durable=lambda step, folder: heard.append(step))
    with pytest.raises(CheckpointError, match="could not start a checkpoint"):
        checkpointer.wait_for_save()
    checkpointer.check()
    assert heard == []
    assert list((tmp_path / "checkpoints").glob("*/*")) == [tmp_path / "checkpoints/step_1/trainer"]


def test_leftovers_are_not_taken_for_checkpoints(model: str, saved: Path) -> None:
    shutil.copytree(saved / "checkpoints/step_6/trainer", saved / "checkpoints/step_8/trainer.partial")
    shutil.copytree(saved / "checkpoints/step_6/trainer", saved / "checkpoints/step_9/trainer.deleted")
    shutil.copytree(saved / "weights/step_6", saved / "weights/step_8.partial")
    assert Checkpointer(*kit.build(model), saved, tokenizer=None).restore(-1) == 6
    assert saved_steps(saved) == [3, 6]
    assert sorted(path.name for path in (saved / "weights").iterdir()) == ["step_3", "step_6"]
