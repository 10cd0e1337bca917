"""Single-turn taskset of the tests: say the word back; a second reward fails on request."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["EchoTaskset"]


class EchoData(vf.TaskData):
    word: str = ""
    break_reward: bool = False


class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.break_reward:
            raise RuntimeError("this reward is broken")
        return float(trace.last_reply == self.data.word)

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 0.25

    @vf.metric
    async def reply_chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class EchoConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("cat", "house", "tree")
    break_reward: bool = False
    endless: bool = False
    parts: bool = False
    image: str = ""


class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    def __init__(self, config: EchoConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def in_parts(self, prompt: str) -> list[vf.UserMessage]:
        parts = [{"type": "text", "text": prompt[:1]}, {"type": "text", "text": prompt[1:]}]
        if self.config.image:
            parts.append({"type": "image_url", "image_url": {"url": self.config.image}})
        return [vf.UserMessage(content=parts)]

    def load(self):
        words = self.config.words
        index = 0
        while index < len(words) or self.config.endless:
            prompt = words[index % len(words)] + ("" if index < len(words) else str(index))
            yield EchoTask(
                EchoData(
                    prompt=self.in_parts(prompt) if self.config.parts else prompt,
                    system_prompt="Say it back.",
                    word=words[index % len(words)],
                    break_reward=self.config.break_reward,
                ),
                self.config.task,
            )
            index += 1
