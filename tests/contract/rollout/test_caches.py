"""What is remembered between rollouts is what would be worked out anew."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pydantic._internal._fields as pydantic_fields
import pytest
import verifiers.v1 as vf
from renderers.base import load_tokenizer
from renderers.default import DefaultRenderer
from verifiers.v1.graph import MessageNode
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime
from verifiers.v1.types import UserMessage
from verifiers.v1.utils import decorators, loaders

from meshrl.rollout import caches
from meshrl.rollout.rendering.render_cache import key_of, quicken, remember_prefixes


@pytest.fixture(autouse=True)
def remembered() -> None:
    caches.install()


def test_every_function_is_still_where_it_is_looked_for():
    for module, name in (
        (pydantic_fields, "takes_validated_data_argument"),
        (loaders, "harness_class"),
        (decorators, "discover_decorated"),
        (decorators, "invoke"),
        (vf.Task, "hash"),
        (SubprocessRuntime, "teardown"),
    ):
        assert hasattr(getattr(module, name), "__wrapped__"), f"{module.__name__}.{name} is not remembered any more"


def subclasses(of: type) -> Iterator[type]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def test_default_factories_are_told_apart_as_pydantic_does():
    factories = {
        field.default_factory
        for model in subclasses(pydantic.BaseModel)
        for field in getattr(model, "__pydantic_fields__", {}).values()
        if field.default_factory is not None
    }
    assert len(factories) > 10
    ask = pydantic_fields.takes_validated_data_argument
    for factory in [*factories, list, lambda: 1, lambda data: data, lambda data=1: data]:
        assert ask(factory) == ask(factory) == ask.__wrapped__(factory)


def test_a_message_is_made_without_reading_a_signature_again(monkeypatch):
    MessageNode.model_construct(message=UserMessage(content="a"))
    monkeypatch.setattr(inspect, "signature", lambda *args, **options: pytest.fail("a signature was read"))
    made = MessageNode.model_construct(message=UserMessage(content="b"))
    assert (made.token_ids, made.semantic_parents, made.sampled) == ([], [], False)
    assert made.token_ids is not MessageNode.model_construct(message=UserMessage(content="c")).token_ids


class Scored(vf.Task[vf.TaskData]):
    @vf.reward(priority=1)
    async def late(self, trace, task) -> tuple:
        return (self, trace, task)

    @vf.reward(priority=2)
    async def early(self) -> object:
        return self

    @vf.metric
    async def size(self, **rest) -> float:
        return 1.0


class Silent(Scored):
    async def late(self) -> None:
        """An override without the mark takes the reward away."""


@pytest.mark.parametrize("cls", [Scored, Silent])
async def test_hooks_are_found_and_called_with_what_they_ask_for(cls):
    discover, invoke = decorators.discover_decorated, decorators.invoke
    for _ in range(2):
        task = cls(vf.TaskData(prompt="x"))
        for mark in ("reward", "metric", "stop"):
            assert discover(task, mark) == discover.__wrapped__(task, mark)
        for hook in (task.early, task.late, task.size, lambda trace: trace):
            given = {"trace": 1, "task": 2, "runtime": 3}
            results = []
            for call in (invoke, invoke.__wrapped__):
                result = call(hook, given)
                results.append(await result if inspect.isawaitable(result) else result)
            assert results[0] == results[1]


def test_a_mark_that_one_task_alone_lacks_is_seen():
    discover = decorators.discover_decorated
    discover(Scored(vf.TaskData(prompt="x")), "reward")
    odd = Scored(vf.TaskData(prompt="x"))
    odd.late = lambda: None
    assert [hook.__name__ for hook in discover(odd, "reward")] == ["early"]


def test_a_tasks_hash_is_that_of_the_data_it_has():
    task = Scored(vf.TaskData(prompt="x"))
    other = task.with_data(prompt="y")
    for one in (task, other, task):
        assert one.hash == one.key == vf.Task.hash.__wrapped__.fget(one)
    assert task.hash != other.hash


@pytest.mark.parametrize("files", [(), ("left.txt",)])
async def test_a_rollouts_folder_is_gone_after_it_whether_empty_or_not(files):
    runtime = SubprocessRuntime(SubprocessConfig(), uuid.uuid4().hex)
    await runtime.start()
    for name in files:
        await runtime.write(name, b"x")
    await runtime.teardown()
    assert not runtime.workdir.exists()
    runtime.cleanup()


def test_a_quick_tokenizer_says_what_a_slow_one_says(tokenizer_dir: Path):
    slow, quick = (load_tokenizer(str(tokenizer_dir)) for _ in range(2))
    quicken(quick)
    for text in ("", "a cat", "<|im_start|>assistant\n", "x" * 200, "<tool_call>{}</tool_call>"):
        for special in (True, False):
            ids = slow.encode(text, add_special_tokens=special)
            assert quick.encode(text, add_special_tokens=special) == ids
            assert quick.encode(text, add_special_tokens=special) == ids
            assert quick.decode(ids, skip_special_tokens=special) == slow.decode(ids, skip_special_tokens=special)
    for token in ("<|im_start|>", "</think>", "no such token", ["a", "b"]):
        assert quick.convert_tokens_to_ids(token) == slow.convert_tokens_to_ids(token)
    assert quick.unk_token_id == slow.unk_token_id
    assert quick.decode([[3, 4], [5]]) == slow.decode([[3, 4], [5]])
    assert quick.decode(3) == slow.decode(3)


def test_prefixes_that_are_kept_render_as_they_did(tokenizer_dir: Path):
    plain, keeping = (DefaultRenderer(load_tokenizer(str(tokenizer_dir))) for _ in range(2))
    remember_prefixes(keeping)
    messages = [{"role": "system", "content": "s"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    for number in range(3):
        messages.append({"role": "user", "content": f"q{number}"})
        for given in (None, tools):
            expected = plain.render(messages, tools=given, add_generation_prompt=True)
            for _ in range(2):
                rendered = keeping.render(messages, tools=given, add_generation_prompt=True)
                assert rendered.token_ids == expected.token_ids
                assert rendered.message_indices == expected.message_indices
        messages.append({"role": "assistant", "content": f"a{number}"})


def test_messages_that_json_does_not_distinguish_have_no_key():
    assert key_of({1, 2}) is None
