"""Files and flags of prime-rl: taken with a note, or refused in one sentence."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.core.config.schema import kind_of
from meshrl.prime_rl.keys import KEYS
from meshrl.sft.config import SFTConfig
from meshrl.wire.types import AdapterSpec
from pasted_files import PROGRAMS, load_program

ROOT = Path(__file__).parents[3]
ENVIRONMENT = "[[orchestrator.env]]\nid = 'reverse-text'\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """Loads a program's configuration from the text of a file and from flags."""

    def load_text(text: str, *flags: str, program: str = "rl", **environ: str) -> Any:
        (tmp_path / "a.toml").write_text(text)
        return load_program(program, ["@", str(tmp_path / "a.toml"), *flags], environ)

    return load_text


@pytest.fixture
def refused(load: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message with which a configuration is refused."""

    def refuse(text: str, *flags: str, program: str = "rl") -> str:
        with pytest.raises(SystemExit) as leaving:
            load(text, *flags, program=program)
        assert leaving.value.code == 2
        return capsys.readouterr().err

    return refuse


def test_a_file_of_2026_means_what_it_says(load: Callable[..., Any]) -> None:
    config = load(
        ENVIRONMENT + "[orchestrator.train.sampling]\nmax_completion_tokens = 128\n"
        "[orchestrator.renderer]\nname = 'qwen3'\n"
        "[inference]\nenable_fp32_lm_head = false\nenable_fp32_router_logits = true\n"
        "[inference.parallel]\ntp = 2\n[inference.model]\nmax_model_len = 4096\n"
        "[trainer.model]\nimpl = 'custom'\nattn = 'flash_attention_3'\nmoe_router_dtype = 'float32'\n"
        "[trainer.model.ac_offloading]\n"
        "max_inflight_activations = 5\n[trainer.model.ac]\n[deployment]\ntype = 'single_node'\n"
    )
    assert config.orchestrator.sampling.max_tokens == 128
    assert (
        [env.id for env in config.orchestrator.train.env] == [env.id for env in config.rollout.env] == ["reverse-text"]
    )
    assert config.rollout.renderer == {"name": "qwen3"}
    assert (config.inference.tensor_parallel_size, config.inference.max_model_len) == (2, 4096)
    assert (config.trainer.model.attn, config.trainer.model.router_dtype) == ("auto", "float32")
    assert (config.inference.head_dtype, config.inference.router_dtype) == ("model", "float32")
    assert config.trainer.model.ac_offloading is not None
    said = "\n".join(config.notes)
    assert "orchestrator.train.sampling is called orchestrator.sampling here (from " in said
    assert "orchestrator.sampling.max_completion_tokens is called orchestrator.sampling.max_tokens here" in said
    assert "trainer.model.impl is not used: " in said
    assert said.count("orchestrator.env is called") == 1


def test_keys_of_several_runs_mean_what_they_say(load: Callable[..., Any], refused: Callable[..., str]) -> None:
    mesh = load(
        ENVIRONMENT + "[orchestrator]\nlora_name = 'mine'\n[orchestrator.model.lora]\nrank = 8\nalpha = 8.0\n"
        "[inference]\nenable_lora = true\nmax_loras = 6\nmax_cpu_loras = 12\nmax_lora_rank = 64\n"
    )
    assert (mesh.trainer.run_id, mesh.orchestrator.run_id) == ("mine", "mine")
    assert (mesh.trainer.model.lora.rank, mesh.trainer.model.lora.alpha) == (8, 8.0)
    assert mesh.inference.vllm_arguments().items() >= {
        "enable_lora": True, "max_loras": 6, "max_cpu_loras": 12, "max_lora_rank": 64,
    }.items()  # fmt: skip
    run = load(
        "[[train.env]]\nid = 'reverse-text'\n[model]\nname = 'm'\n[model.lora]\nname = 'mine'\nrank = 4\nalpha = 8.0\n"
        "[optim]\nlr = 1e-3\nweight_decay = 0.1\n[scheduler]\ntype = 'linear'\nwarmup_steps = 3\n"
        "[loss]\ntype = 'grpo'\nclip_high = 0.3\n",
        program="orchestrator",
    )
    spec = run.run.spec()
    assert (run.run_id, spec.adapter.rank, spec.adapter.alpha) == ("mine", 4, 8.0)
    assert (spec.optimizer.learning_rate, spec.optimizer.weight_decay) == (1e-3, 0.1)
    assert (spec.schedule.type, spec.schedule.warmup_steps) == ("linear", 3)
    assert (spec.loss.name, spec.loss.constants) == ("grpo", {"clip_high": 0.3})
    off = "[inference]\nenable_lora = false\n[trainer.model.lora]\nrank = 8\n"
    assert "inference.enable_lora is false, but trainer.model.lora publishes adapters" in refused(ENVIRONMENT + off)


def test_an_adapters_alpha_alone_has_the_rank_of_the_trainers_own(load: Callable[..., Any]) -> None:
    text = "run_id = 'mine'\n[[train.env]]\nid = 'reverse-text'\n[model.lora]\nalpha = 6.0\n"
    run = load(text, program="orchestrator").run
    own = AdapterSpec(rank=8, alpha=1.0, target_modules=("q_proj",))
    assert (run.spec(own).adapter.rank, run.spec(own).adapter.alpha) == (8, 6.0)
    with pytest.raises(ValueError, match=r"run\.lora\.rank is missing"):
        run.spec()


def test_an_environment_of_2025_is_the_first_to_train_on(load: Callable[..., Any]) -> None:
    config = load("[orchestrator.environment]\nid = 'alphabet-sort'\n[orchestrator.environment.args]\nmin_turns = 3\n")
    assert [(env.id, env.args) for env in config.orchestrator.train.env] == [("alphabet-sort", {"min_turns": 3})]


def test_a_source_with_the_block_of_verifiers_is_an_environment(load: Callable[..., Any]) -> None:
    config = load(
        "[[orchestrator.train.source]]\nname = 'math'\nenv.taskset = { id = 'math-v1', level = 3 }\n"
        "env.agent.harness = { id = 'null', runtime = { type = 'subprocess' } }\n"
    )
    assert [(env.name, env.id, env.args) for env in config.orchestrator.train.env] == [
        ("math", "math-v1", {"level": 3})
    ]


def test_a_source_of_the_newest_releases_is_an_environment_and_settings_of_its_agents_are_its_args(
    load: Callable[..., Any], refused: Callable[..., str]
) -> None:
    source = "[[orchestrator.train.source]]\nname = '{}'\nenv.taskset.id = 'nim'\nenv.player0.runtime.type = '{}'\n"
    config = load(source.format("a", "subprocess") + source.format("b", "subprocess"))
    assert [(env.id, env.args) for env in config.orchestrator.train.env] == [("nim", {}), ("nim", {})]
    assert [note.partition(":")[0] for note in config.notes if "runtime" in note] == [
        "orchestrator.train.env.*.env.*.runtime.type is not used"
    ]
    agent = "env.player0.harness.id = 'bash'\nenv.player0.timeout.rollout = 9\n"
    (env,) = load(source.format("a", "docker") + agent).orchestrator.train.env
    assert env.args == {
        "player0": {"runtime": {"type": "docker"}, "harness": {"id": "bash"}, "timeout": {"rollout": 9}}
    }
    both = refused("[[orchestrator.train.source]]\nenv = { id = 'user-sim', taskset = { id = 'nim' } }\n")
    assert "orchestrator.train.env.0.env.id is not there: one id names both: id = 'ENVIRONMENT+TASKSET'" in both


def test_arguments_of_vllm_that_are_keys_here_are_taken_in_its_table(load: Callable[..., Any]) -> None:
    config = load(
        "seq_len = 512\n" + ENVIRONMENT + "[model]\nname = 'm'\n[inference.vllm]\nmax_model_len = 512\nseed = 4\n"
        "tensor_parallel_size = 2\nquantization = 'fp8'\n"
    ).inference  # fmt: skip
    assert (config.max_model_len, config.seed, config.gpus_per_engine()) == (512, 4, 2)
    assert config.vllm == {"tensor_parallel_size": 2, "quantization": "fp8"}
    alone = load("[vllm]\nmodel = 'm'\nmax_model_len = 64\n", program="inference")
    assert (alone.model.name, alone.max_model_len, alone.vllm) == ("m", 64, {})


def test_a_section_to_resume_is_the_step_to_resume(load: Callable[..., Any], refused: Callable[..., str]) -> None:
    assert load(ENVIRONMENT + "[resume]\n").trainer.ckpt.resume_step == -1
    assert load(ENVIRONMENT + "[ckpt]\ninterval = 5\n[resume]\nstep = 15\n").trainer.ckpt.resume_step == 15
    assert load("[resume]\n", program="sft").ckpt.resume_step == -1
    assert "resume.dir is not there: a run resumes its own output_dir" in refused(ENVIRONMENT + "[resume]\ndir = 'a'\n")


def test_a_teacher_that_an_algorithm_names_itself_is_its_teacher(load: Callable[..., Any]) -> None:
    teacher = "name = 'big'\nbase_url = 'http://10.0.0.1:8001/v1'\n"
    algo = load(ENVIRONMENT + "[orchestrator.algo]\ntype = 'opd'\n[orchestrator.algo.teacher]\n" + teacher)
    assert algo.orchestrator.algo.teacher.client.base_url == ["http://10.0.0.1:8001/v1"]
    sft = load(ENVIRONMENT + "[orchestrator.algo]\ntype = 'sft'\n[orchestrator.algo.sampling.source]\n" + teacher)
    assert sft.orchestrator.teacher.model.name == "big"


def test_flags_and_variables_have_older_spellings_too(load: Callable[..., Any]) -> None:
    config = load(
        ENVIRONMENT, "--orchestrator.train.sampling.max-completion-tokens", "64",
        PRIME_ORCHESTRATOR__ROLLOUTS_PER_EXAMPLE="16", PRIME_ORCHESTRATOR__RENDERER__NAME="qwen3",
    )  # fmt: skip
    assert (config.orchestrator.sampling.max_tokens, config.orchestrator.group_size) == (64, 16)
    assert config.rollout.renderer == {"name": "qwen3"}
    assert config.notes[0].endswith("(from PRIME_ORCHESTRATOR__ROLLOUTS_PER_EXAMPLE)")


def test_a_later_layer_wins_over_an_older_spelling(load: Callable[..., Any]) -> None:
    text = (
        ENVIRONMENT + "[orchestrator]\nrollouts_per_example = 16\n[orchestrator.sampling]\nmax_completion_tokens = 9\n"
    )
    config = load(text, "--orchestrator.group-size", "32", "--orchestrator.sampling.max-tokens", "10")
    assert (config.orchestrator.group_size, config.orchestrator.sampling.max_tokens) == (32, 10)


def test_two_spellings_that_disagree_are_an_error_that_names_both_places(refused: Callable[..., str]) -> None:
    said = refused(
        ENVIRONMENT
        + "[orchestrator.sampling]\nmax_tokens = 5\n[orchestrator.train.sampling]\nmax_completion_tokens = 6\n",
        "--orchestrator.group-size", "8", "--orchestrator.rollouts-per-example", "16",
    )  # fmt: skip
    assert "orchestrator.sampling.max_tokens is 5 (from " in said
    assert "orchestrator.sampling.max_completion_tokens, as prime-rl calls it, is 6 (from " in said
    assert (
        "orchestrator.group_size is '8' (from --orchestrator.group-size), but orchestrator.rollouts_per_example, as"
        " prime-rl calls it, is '16' (from --orchestrator.rollouts-per-example); keep only orchestrator.group_size"
        in said
    )


def test_two_lists_under_two_spellings_are_one_line(refused: Callable[..., str]) -> None:
    said = refused(
        "[[orchestrator.env]]\nid = 'a'\n[[orchestrator.train.env]]\nid = 'b'\n[orchestrator.train.env.args]\nk = 1\n"
    )
    lines = [line for line in said.splitlines() if "as prime-rl calls it" in line]
    assert len(lines) == 1
    assert "orchestrator.train.env" in lines[0]


def test_two_spellings_that_agree_are_one(load: Callable[..., Any]) -> None:
    assert load(ENVIRONMENT + "[orchestrator]\ngroup_size = 4\nrollouts_per_example = 4\n").orchestrator.group_size == 4


def test_what_is_not_there_is_said_together_with_all_that_is_wrong(refused: Callable[..., str]) -> None:
    lines = refused(
        "batchsize = 4\n[orchestrator]\ngroup_size = 7\nbatchsize = 8\nuse_sft_loss = true\n"
        "[trainer.optim]\nlr = 'x'\n[env_vars]\nname = 'x'\n[trainer.model]\ncp_style = 'ring'\n",
        "--teacher-gpu-ids", "1", "--fooo", "1",
    ).splitlines()  # fmt: skip
    assert lines[0] == "rl: the configuration has 9 errors"
    keys = [line.strip().split(": ")[0] for line in lines[1:-1]]
    assert sorted(keys[1:]) == sorted(
        [
            "env_vars is not there", "orchestrator.use_sft_loss",
            "trainer.model.cp_style is not there",
            "teacher_gpu_ids is not there", "trainer.optim.lr", "orchestrator.batchsize", "batchsize",
            "orchestrator.train.env",
        ]
    )  # fmt: skip
    assert keys[0].startswith("unknown option --fooo")


def test_an_unknown_key_of_a_large_section_does_not_list_all_of_them(refused: Callable[..., str]) -> None:
    said = refused(ENVIRONMENT + "[trainer]\nenable_zzz = true\n[trainer.ckpt]\nzzz = 1\n").splitlines()
    assert [line.strip().partition(" (from ")[0] for line in said[1:3]] == [
        "trainer.enable_zzz: no such key", "trainer.ckpt.zzz: no such key"
    ]  # fmt: skip
    assert said[1].endswith("a.toml:4)")
    assert "; keys of trainer.ckpt are interval, " in said[2]


def test_values_that_change_nothing_are_taken(load: Callable[..., Any]) -> None:
    config = load(
        ENVIRONMENT + "[orchestrator]\nneed_sft_loss = false\nmask_truncated_completions = false\n"
        "[deployment]\nnum_train_nodes = 1\n"
    )
    assert len(config.notes) == 3


def test_ranks_that_share_rows_are_asked_for_as_elsewhere(load: Callable[..., Any]) -> None:
    config = load(ENVIRONMENT + "[trainer.model]\ncp = 2\ntp = 'auto'\nep = 'auto'\ncp_style = 'ulysses'\n")
    assert (config.trainer.model.cp, config.trainer.model.tp, config.trainer.model.ep) == (2, 1, "auto")
    assert any("cp_style is not used" in note for note in config.notes)


def test_lists_are_written_with_spaces_commas_or_brackets(load: Callable[..., Any]) -> None:
    for words in (["0", "1", "2"], ["0,1", "2"], ["[0, 1, 2]"]):
        config = load(ENVIRONMENT, "--inference", "--inference-gpu-ids", *words, "--trainer-gpu-ids", "3")
        assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0, 1, 2], [3])
    layers = load(
        ENVIRONMENT, "--trainer.model.lora.target-modules", "q_proj", "k_proj"
    ).trainer.model.lora.target_modules
    assert layers == ["q_proj", "k_proj"]


def test_orchestrator_alone_takes_the_sections_of_its_file(load: Callable[..., Any]) -> None:
    config = load(
        "batch_size = 512\nmicro_batch_size = 8\nrollouts_per_example = 8\nmask_truncated_completions = false\n"
        "[model]\nname = 'm'\n[client]\nbase_url = ['http://10.0.0.1:8000/v1']\n[ckpt]\ninterval = 5\nresume_step = 5\n"
        "[wandb]\nproject = 'p'\n[sampling]\nmax_tokens = 768\n[environment]\nid = 'reverse-text'\n",
        "--client.api-key-var", "KEY", "--model.name", "n", program="orchestrator",
    )  # fmt: skip
    assert (config.group_size, config.checkpoint_interval, config.wandb.project) == (8, 5, "p")
    assert [env.id for env in config.train.env] == ["reverse-text"]
    said = "\n".join(config.notes)
    assert "client is not used: the rollout program calls engines; start it with the same [client]" in said
    assert "ckpt is not used: the trainer writes and resumes checkpoints" in said


def test_orchestrator_alone_writes_its_part_of_the_last_checkpoint_where_there_is_a_section(
    load: Callable[..., Any],
) -> None:
    assert load("[ckpt]\n", program="orchestrator").checkpoint_at_end
    assert not load("", program="orchestrator").checkpoint_at_end


def test_trainer_alone_takes_the_sections_of_its_file(load: Callable[..., Any]) -> None:
    text = "max_steps = 9\n[wandb]\nproject = 'p'\n[data]\nseq_len = 256\nmicro_batch_size = 2\n"
    text += "[model.experimental.lora]\n"
    config = load(text, program="trainer")
    assert (config.seq_len, config.max_steps) == (256, 9)
    assert config.model.lora is not None
    assert load("[model]\nseq_len = 512\n", program="trainer").seq_len == 512


def test_a_trainer_on_made_up_data_is_its_benchmark_and_waits_for_no_orchestrator(
    load: Callable[..., Any], refused: Callable[..., str]
) -> None:
    fake = load("max_steps = 5\n[data.fake]\nbatch_size = 2\ngenerate_samples = true\n", program="trainer")
    assert (fake.bench.rows, fake.bench.lengths) == (2, "variable")
    assert load("", "--data.fake", "--bench", program="trainer").bench == load("", "--bench", program="trainer").bench
    assert "trainer.bench measures the trainer without a run" in refused(ENVIRONMENT + "[trainer.data.fake]\n")


def test_a_key_of_the_trainer_for_wandb_has_a_note_that_it_has_no_effect(load: Callable[..., Any]) -> None:
    config = load(ENVIRONMENT, "--wandb", "--no-trainer.wandb.log-extras.distributions")
    assert config.orchestrator.wandb.log_extras.distributions is True
    assert config.notes[1:] == (
        "trainer.wandb is not used: the orchestrator logs the trainer's metrics; set wandb there, or at the top of rl"
        " (from --no-trainer.wandb.log-extras.distributions)",
    )


def test_a_trainer_of_several_runs_needs_adapters(refused: Callable[..., str]) -> None:
    assert "trainer.max_concurrent_runs above 1 needs trainer.model.lora" in refused(
        "", "--max-concurrent-runs", "4", program="trainer"
    )


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name in ("orchestrator", "trainer", "inference")])
def test_dry_run_of_a_program_alone_shows_its_configuration(
    load: Callable[..., Any], capsys: pytest.CaptureFixture[str], program: str
) -> None:
    with pytest.raises(SystemExit) as leaving:
        load("", "--dry-run", "--model.name" if program == "inference" else "--output-dir", "here", program=program)
    out, err = capsys.readouterr()
    assert (leaving.value.code, err.count("dry run: the configuration is valid")) == (0, 1)
    assert ('name = "here"' if program == "inference" else 'output_dir = "here"') in out


def test_every_successor_is_a_key_and_no_key_is_in_the_table() -> None:
    stale = [key.old for key in KEYS if _has("rl", key.old) and not (key.values or key.alone or ".vllm." in key.old)]
    assert stale == []
    assert [key.new for key in KEYS if key.new and not _has(key.new.split(".")[0], key.new)] == []


def test_the_counterparts_of_keys_of_trl_and_verl_are_keys() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    cells = re.findall(r"^\|[^|]*\|[^|]*\| (.*) \|$", page.partition("| TRL | verl |")[2], flags=re.MULTILINE)
    keys = [key for cell in cells for key in re.findall(r"`([a-z_.]+)(?: = \d)?`", cell)]
    assert len(keys) > 8
    assert [key for key in keys if not _has("rl", key)] == []


def _has(program: str, dotted: str) -> bool:
    """Whether a path of `rl`, or of `sft` below its name, is a key by its present name."""
    kind, parts = kind_of(PROGRAMS["rl"]), dotted.split(".")
    if program == "sft":
        kind, parts = kind_of(SFTConfig), parts[1:]
    for part in parts:
        step = kind.step("0" if part == "*" else part)
        if step is None or (not part.isdecimal() and part != "*" and step[0] != part):
            return False
        kind = step[1]
    return True


def test_the_page_lists_the_table() -> None:
    spec = importlib.util.spec_from_file_location("prime_rl_table", ROOT / "scripts" / "prime_rl_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "prime-rl-keys.md").read_text()
    assert script.with_tables(page) == page, "run: python scripts/prime_rl_table.py"
