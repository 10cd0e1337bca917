"""How an entry of the configuration becomes an environment of verifiers."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import taskset_class

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import EnvConfig
from meshrl.environments.plugins import plugin_id
from meshrl.rollout import hosting
from meshrl.rollout.rendering.renderer import load_renderer
from meshrl.wire.types import Sampling

HARNESS = "meshrl.environments.harness"


class WordConfig(vf.TasksetConfig):
    word: str = "cat"


class WordTask(vf.Task[vf.TaskData]):
    pass


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self):
        if self.config.word == "missing":
            Path("/no/such/words.jsonl").read_text()
        if self.config.word == "odd":
            raise RuntimeError("the words are odd")
        if self.config.word:
            yield WordTask(vf.TaskData(prompt=self.config.word), self.config.task)


@pytest.fixture(autouse=True)
def word_taskset(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mesh_unit_words")
    module.WordTaskset = WordTaskset
    module.__all__ = ["WordTaskset"]
    monkeypatch.setitem(sys.modules, "mesh_unit_words", module)


def block(**entry: object) -> dict:
    return hosting.env_block(EnvConfig(**{"id": "mesh_unit_words", **entry}), harness=HARNESS, max_turns=None)


def load(**entry: object) -> hosting.HostedEnvironment:
    config = EnvConfig(**{"id": "mesh_unit_words", **entry})
    return hosting.load(config, model="m", harness=HARNESS, max_turns=4, default_sampling=Sampling(seed=10, top_p=0.5))


def test_a_plain_taskset_is_played_by_the_in_process_harness_without_a_sandbox():
    assert block(args={"word": "dog"}) == {
        "id": "",
        "taskset": {"id": "mesh_unit_words", "word": "dog"},
        "agent": {"harness": {"id": "meshrl_environments_harness"}, "runtime": {"type": "subprocess"}},
        "interception": {"type": "server"},
    }


def test_agents_and_environment_options_in_args_go_to_the_environment():
    made = block(args={"word": "dog", "timeout": {"episode": 5.0}, "agent": {"max_turns": 2}})
    assert made["timeout"] == {"episode": 5.0}
    assert made["agent"]["max_turns"] == 2
    assert made["taskset"] == {"id": "mesh_unit_words", "word": "dog"}


def test_a_harness_that_is_pinned_is_kept():
    made = block(args={"agent": {"harness": {"id": "null"}}})
    assert made["agent"] == {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    sandboxed = block(args={"agent": {"harness": {"id": "codex"}}})
    assert "runtime" not in sandboxed["agent"]
    assert "interception" not in sandboxed


def test_another_environment_can_play_a_taskset_and_a_role_that_only_chats_does_so_in_process():
    made = block(id="user-sim+mesh_unit_words", args={"user": {"harness": {"id": HARNESS}}})
    assert made["id"] == "user-sim"
    assert made["assistant"]["harness"] == {"id": "meshrl_environments_harness"}
    assert made["user"]["harness"] == {"id": "meshrl_environments_harness"}
    assert block(id="user-sim+mesh_unit_words")["user"] == made["user"]
    named = block(id="user-sim+mesh_unit_words", args={"user": {"harness": {"id": "null"}, "max_turns": 3}})
    assert named["user"] == {"harness": {"id": "null"}, "max_turns": 3, "runtime": {"type": "subprocess"}}


def test_a_tool_server_whose_module_starts_nothing_is_refused_before_anything_waits_for_it():
    class Counter(vf.Toolset[vf.SharedToolsetConfig]):
        pass

    module = sys.modules["mesh_unit_words"]
    module.__file__ = __file__
    Counter.__module__ = "mesh_unit_words"
    elsewhere = vf.SharedToolsetConfig(url="http://127.0.0.1:1/mcp")
    assert hosting.can_be_started(Counter(elsewhere))
    WordTaskset.toolsets = classmethod(lambda cls, config: [Counter(vf.SharedToolsetConfig())])
    try:
        with pytest.raises(ConfigError) as refused:
            load()
    finally:
        del WordTaskset.toolsets
    assert "tool server Counter is started as `python -m mesh_unit_words`, which does nothing; end that module" in str(
        refused.value
    )


def test_an_environment_is_loaded_with_its_limits_and_described():
    hosted = load(name="words")
    assert (hosted.info.name, hosted.info.taskset, hosted.info.num_tasks) == ("words", "mesh_unit_words", 1)
    assert hosted.env.config.agent.max_turns == 4
    assert type(hosted.env._harnesses["agent"]).__name__ == "InProcessHarness"


def test_rollouts_of_a_group_have_seeds_of_their_own():
    hosted = load()
    assert [hosted.sampling(Sampling(), index).seed for index in range(3)] == [10, 11, 12]
    assert hosted.sampling(Sampling(seed=5, top_p=0.9), 2) == Sampling(seed=7, top_p=0.9)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"id": "no_such_taskset"}, "no_such_taskset"),
        ({"id": "no.such.taskset"}, "cannot be loaded"),
        ({"args": {"wrod": "dog"}}, "wrod"),
        ({"args": {"word": ""}}, "has no tasks"),
    ],
)
def test_an_environment_that_cannot_be_loaded_says_why(entry: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        load(**entry)


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("missing", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/words.jsonl'"),
        ("odd", "RuntimeError: the words are odd"),
    ],
)
def test_a_taskset_whose_own_code_fails_is_named_with_its_cause(word: str, cause: str):
    with pytest.raises(ConfigError) as refused:
        load(name="words", args={"word": word})
    assert str(refused.value) == (
        f"environment 'words': taskset 'mesh_unit_words' cannot load its tasks: {cause}; correct its args or what it"
        " reads (--log.level debug shows where it failed)"
    )


@pytest.mark.parametrize(
    ("entry", "rewarded"),
    [
        ({}, False),
        ({"args": {"task": {"judges": [{"id": "reference"}]}}}, True),
        ({"args": {"task": {"rewards": {"length": {"fn": "my_rewards.length"}}}}}, True),
        ({"id": "best-of-n+mesh_unit_words"}, True),  # its own code may reward
        ({"id": "reverse_text"}, True),
        ({"id": "nim"}, True),
    ],
)
def test_an_environment_that_nothing_rewards_is_known(entry: dict, rewarded: bool):
    config = EnvConfig(**{"id": "mesh_unit_words", "name": "words", **entry})
    doubt = hosting.why_unrewarded("words", hosting.configured(config, harness=HARNESS, max_turns=None))
    assert (doubt is None) is rewarded
    assert doubt is None or "nothing rewards a rollout of 'mesh_unit_words'" in doubt


def test_a_dotted_module_is_known_to_verifiers_under_one_name_and_loaded_once():
    from meshrl.environments import harness

    assert plugin_id(HARNESS) == plugin_id(HARNESS) == "meshrl_environments_harness"
    assert sys.modules["meshrl_environments_harness"] is harness
    assert plugin_id("gsm8k-v1") == "gsm8k-v1"
    assert plugin_id("owner/name@1.0") == "owner/name@1.0"


def test_a_tokenizer_that_does_not_exist_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.tokenizer"):
        load_renderer(str(tmp_path / "nothing"), {})


def test_a_taskset_that_brings_a_harness_is_played_by_it(monkeypatch: pytest.MonkeyPatch):
    from meshrl.environments.harness import InProcessHarness

    class OwnHarness(InProcessHarness):
        pass

    module = sys.modules["mesh_unit_words"]
    module.OwnHarness = OwnHarness
    module.__all__ = ["WordTaskset", "OwnHarness"]
    assert block()["agent"] == {"runtime": {"type": "subprocess"}}
    assert type(load().env._harnesses["agent"]) is OwnHarness


def test_a_dotted_module_is_found_without_the_import_of_the_tasksets_of_verifiers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1.tasksets", None)  # its import fails
    assert taskset_class(plugin_id("reverse_text")).__name__ == "ReverseTextTaskset"
