"""A file of `rl` as one more run of a mesh: its orchestrator whole, and of its trainer what a run has of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.cli.run_folder import RunFolder
from meshrl.core.config import ConfigError, dump_toml, load_config
from meshrl.launch.config import RLConfig
from meshrl.launch.join import has_sections, joined
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.main import in_mesh
from meshrl.weights.config import WeightsConfig

ROOT = Path(__file__).parents[3]
SOLO = """
output_dir = "outputs/solo"
max_steps = 7
[trainer]
model.lora = { rank = 4, alpha = 4.0 }
optim = { lr = 1e-3, betas2 = 0.95 }
loss.type = "cispo"
[inference]
[orchestrator]
batch_size = 16
group_size = 4
train.env = [{ id = "reverse_text" }]
"""


def run_of(tmp_path: Path, *argv: str, text: str = SOLO) -> OrchestratorConfig:
    file = tmp_path / "solo.toml"
    file.write_text(text)
    words = ["@", str(file), "--mesh", str(tmp_path / "mesh"), *argv]
    return joined(load_config(RLConfig, words, prog="rl", environ={}))


def test_a_file_of_rl_brings_its_orchestrator_and_what_a_run_has_of_its_own(tmp_path: Path) -> None:
    config = run_of(tmp_path, "--run-id", "mine", "--orchestrator.batch-size", "32")
    assert (config.mesh, config.run_id, config.max_steps, config.batch_size) == (tmp_path / "mesh", "mine", 7, 32)
    assert not {"output_dir", "services"} & config.model_fields_set  # those of the mesh
    mesh = tmp_path / "mesh"
    for name in ("rollout", "trainer", "weights"):
        dump_toml(WeightsConfig(server={"host": "127.0.0.1", "port": 7001}), mesh / "configs" / f"{name}.toml")
    (mesh / "credentials").mkdir()
    (mesh / "credentials" / "orchestrator.token").touch()
    there = in_mesh(config.model_dump(exclude_unset=True), RunFolder(mesh))
    assert (there.output_dir, there.services.trainer) == (mesh / "run_mine", "127.0.0.1:7001")
    assert there.tls.token == mesh / "credentials" / "orchestrator.token"
    spec = config.run.spec()
    assert (spec.adapter.rank, spec.adapter.alpha) == (4, 4.0)
    assert (spec.optimizer.learning_rate, spec.optimizer.beta2, spec.optimizer.beta1) == (1e-3, 0.95, None)
    assert (spec.loss.name, spec.loss.constants, spec.schedule) == ("cispo", {"clip_high": 4.0}, None)


def test_what_the_file_leaves_out_is_as_in_the_mesh_and_a_flag_names_the_folder(tmp_path: Path) -> None:
    bare = SOLO.partition("[trainer]")[0] + "[orchestrator]" + SOLO.partition("[orchestrator]")[2]
    config = run_of(tmp_path, "--run-id", "mine", "--output-dir", str(tmp_path / "own"), text=bare)
    spec = config.run.spec()
    assert (spec.adapter, spec.optimizer, spec.schedule, spec.loss) == (None, None, None, None)
    assert config.output_dir == tmp_path / "own"


def test_keys_of_the_orchestrator_at_the_top_are_its_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('run_id = "mine"\n[[train.env]]\nid = "reverse_text"\n[run.lora]\nrank = 4\n')
    assert not has_sections(["@", str(file), "--mesh", "outputs/mesh", "--sampling.max-tokens", "8"])
    assert has_sections(["@", str(file), "--orchestrator.batch-size", "8"])
    file.write_text(SOLO)
    assert has_sections(["@", str(file), "--mesh", "outputs/mesh"])


def test_every_example_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["@", "configs/reverse_text/rl.toml", "--run-id", "mine", "--mesh", "outputs/mesh"]
    config = joined(load_config(RLConfig, words, prog="rl", environ={}))
    assert config.eval is not None
    assert config.run is not None
    assert config.run.spec().schedule.warmup_steps == 5


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "--mesh adds a run, but run_id is empty; name the run with --run-id"),
        (
            ("--run-id", "a", "--trainer.loss.normaliser", "sequence"),
            "trainer.loss.normaliser is 'sequence', which a run",
        ),
    ],
)
def test_what_cannot_join_is_refused(tmp_path: Path, flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_of(tmp_path, *flags)
