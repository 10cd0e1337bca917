"""Branches of a message graph become samples."""

import numpy as np
import pytest
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch
from verifiers.v1.types import AssistantMessage, TextContentPart, ToolCall, UserMessage

from meshrl.rollout.engines.calls import Call
from meshrl.rollout.samples import samples_of, trace_uuid
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionSpan


def user(*tokens: int) -> MessageNode:
    return MessageNode(message=UserMessage(content="u"), token_ids=list(tokens), mask=[False] * len(tokens))


def assistant(header: list[int], sampled: list[int], logprobs: list[float]) -> MessageNode:
    return MessageNode(
        message=AssistantMessage(content="a"),
        sampled=True,
        token_ids=header + sampled,
        mask=[False] * len(header) + [True] * len(sampled),
        logprobs=logprobs,
    )


def branch(*nodes: MessageNode, trainable: bool = True) -> Branch:
    return Branch.model_construct(index=0, nodes=list(nodes), calls=[], trainable=trainable, mm_token_type_id_map={})


def call(completion_ids: list[int], *spans: tuple[int, ...]) -> Call:
    """A model call whose spans are (start, end, version) and maybe the prompt's version."""
    names = ("start", "end", "version", "prompt_version")
    return Call(completion_ids, tuple(VersionSpan(**dict(zip(names, span, strict=False))) for span in spans))


def spans(sample) -> list[tuple[int, int, int]]:
    return [(span.start, span.end, span.version) for span in sample.version_spans]


def test_turns_of_one_branch_merge_and_spans_of_one_version_join():
    turns = [user(1, 2), assistant([3], [4, 5], [-0.1, -0.2]), user(6), assistant([], [7], [-0.3])]
    calls = [call([4, 5], (0, 1, 8), (1, 2, 9)), call([7], (0, 1, 9))]
    (sample,) = samples_of([branch(*turns)], calls, 0.5)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [False, False, False, True, True, False, True]
    np.testing.assert_allclose(sample.logprobs, [0, 0, 0, -0.1, -0.2, 0, -0.3], rtol=1e-6)
    assert spans(sample) == [(3, 4, 8), (4, 5, 9), (6, 7, 9)]
    assert [(s.start, s.end, s.role) for s in sample.message_spans] == [
        (0, 2, "user"),
        (2, 5, "assistant"),
        (5, 6, "user"),
        (6, 7, "assistant"),
    ]
    assert sample.temperature == 0.5


def test_the_text_of_a_message_is_its_reasoning_its_parts_and_its_tool_calls() -> None:
    question = MessageNode(
        message=UserMessage(content=[TextContentPart(text="what is "), TextContentPart(text="1 + 2?")]),
        token_ids=[1],
        mask=[False],
    )
    tool_call = ToolCall(id="c", name="add", arguments='{"a": 1, "b": 2}')
    reply = assistant([], [2], [-0.1])
    reply.message = AssistantMessage(content="let me see", reasoning_content="a sum", tool_calls=[tool_call])
    (sample,) = samples_of([branch(question, reply)], [call([2], (0, 1, 1))], 1.0)
    assert [span.text for span in sample.message_spans] == [
        "what is 1 + 2?",
        '<think>a sum</think>\nlet me see\nadd({"a": 1, "b": 2})',
    ]


def test_the_content_of_a_message_is_told_where_the_renderer_tells_it() -> None:
    asked, silent, untold = user(1, 2, 3, 4), user(5, 6), user(7)
    asked.is_content = [False, True, True, False]
    silent.is_content = [False, False]
    reply = assistant([8], [9], [-0.1])
    reply.is_content = [False, True]
    (sample,) = samples_of([branch(asked, silent, untold, reply)], [call([9], (0, 1, 1))], 1.0)
    assert [(span.content_start, span.content_end) for span in sample.message_spans] == [
        (1, 3), (4, 4), (None, None), (8, 9),
    ]  # fmt: skip


def test_a_message_that_branches_share_trains_in_the_first_only():
    shared = assistant([], [2], [-0.1])
    first = branch(user(1), shared, assistant([], [3], [-0.2]))
    second = branch(user(1), shared, user(4), assistant([], [5], [-0.3]))
    calls = [call([2], (0, 1, 1)), call([3], (0, 1, 2)), call([5], (0, 1, 3))]
    one, two = samples_of([first, second], calls, 1.0)
    assert one.loss_mask.tolist() == [False, True, True]
    assert two.loss_mask.tolist() == [False, False, False, True]
    assert two.logprobs.tolist()[1] == 0.0
    assert spans(two) == [(3, 4, 3)]


def test_branches_without_sampled_tokens_or_training_are_left_out():
    calls = [call([2], (0, 1, 1))]
    kept = branch(user(1), assistant([], [2], [-0.1]))
    assert samples_of([branch(user(1)), branch(user(1), assistant([9], [], []))], [], 1.0) == ()
    assert samples_of([branch(user(1), assistant([], [7], [-1.0]), trainable=False)], [], 1.0) == ()
    assert len(samples_of([branch(user(1)), kept], calls, 1.0)) == 1


def test_equal_replies_take_their_versions_in_order():
    turns = [user(1), assistant([], [2], [-0.1]), user(3), assistant([], [2], [-0.1])]
    (sample,) = samples_of([branch(*turns)], [call([2], (0, 1, 4)), call([2], (0, 1, 5))], 1.0)
    assert spans(sample) == [(1, 2, 4), (3, 4, 5)]


def test_tokens_without_a_model_call_are_a_defect():
    with pytest.raises(MeshError) as caught:
        samples_of([branch(user(1), assistant([], [2], [-0.1]))], [call([3], (0, 1, 1))], 1.0)
    assert caught.value.reason is Reason.INTERNAL


def test_trace_ids_become_uuids():
    assert trace_uuid("3714550faf3941a4a405c642e527fb58") == "3714550f-af39-41a4-a405-c642e527fb58"
    assert trace_uuid("mine") == "mine"


def test_first_span_of_a_turn_says_which_version_computed_its_prompt():
    turns = [user(1, 2), assistant([], [3, 4], [-0.1, -0.2]), assistant([], [5], [-0.3])]
    calls = [call([3, 4], (0, 1, 8, 7), (1, 2, 9)), call([5], (0, 1, 9, 8))]
    (sample,) = samples_of([branch(*turns)], calls, 1.0)
    assert spans(sample) == [(2, 3, 8), (3, 4, 9), (4, 5, 9)]
    assert [span.prompt_version for span in sample.version_spans] == [7, None, 8]
