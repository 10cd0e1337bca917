"""Makes samples of rollouts that another model played as text, for the policy to imitate (`rollout.text_samples`).

Every reply is a sample of its own behind the prompt that the policy would have been given, so a template that renders
history otherwise than replies does no harm. Logprobs, which are unknown, are 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.trace import Trace
from verifiers.v1.types import content_text

from meshrl.rollout.rendering.renderer import PolicyRenderer
from meshrl.wire.types import MessageSpan, Sample


class TextSamples:
    def __init__(self, renderer: PolicyRenderer, *, seq_len: int) -> None:
        self._renderer = renderer
        self._seq_len = seq_len

    async def of(self, trace: Trace) -> tuple[Sample, ...]:
        """One sample for each reply, in order. Raises MeshError INVALID_REQUEST for a reply that the policy's template
        does not render behind its prompt."""
        samples: list[Sample] = []
        seen: set[int] = set()
        for branch in trace.branches:
            tools = [tool_to_wire(tool) for tool in branch.tools] or None
            for place, node in enumerate(branch.nodes):
                if node.sampled and place and id(node) not in seen:
                    seen.add(id(node))
                    samples.append(await self._sample([each.message for each in branch.nodes[: place + 1]], tools))
        return tuple(samples)

    async def _sample(self, messages: list[object], tools: list[Mapping[str, object]] | None) -> Sample:
        prompt_ids, reply_ids = await self._renderer.reply(messages, tools)
        token_ids = np.asarray([*prompt_ids, *reply_ids], dtype=np.int32)[: self._seq_len]
        end, start = len(token_ids), min(len(prompt_ids), len(token_ids))
        asked, said = messages[-2], messages[-1]
        spans = [MessageSpan(start=0, end=start, role=str(getattr(asked, "role", "user")), text=_text(asked))]
        if end > start:
            spans.append(MessageSpan(start=start, end=end, role="assistant", text=_text(said)))
        return Sample(
            token_ids=token_ids,
            loss_mask=np.arange(end) >= start,
            logprobs=np.zeros(end, dtype=np.float32),
            version_spans=(),
            message_spans=tuple(spans),
        )


def _text(message: object) -> str:
    text: str = content_text(getattr(message, "content", None))
    return text
