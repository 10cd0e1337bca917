"""Writes warm-up data for `sft`: conversations in which "Reverse the text." was understood in more than one way.

Some replies have the letters in reverse order, which is rewarded; the others repeat the text or reverse the order of
its words. RL finds out which is wanted. `python -m meshrl.environments.reverse_text.demonstrations FOLDER`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from meshrl_examples.demonstrations import run_command
from meshrl_examples.words import Split

from .sentences import SYSTEM_PROMPT, sentences

PASSES = 4
SHARE = 0.3


def letters_reversed(text: str) -> str:
    return text[::-1]


def words_reversed(text: str) -> str:
    return " ".join(reversed(text.split()))


def repeated(text: str) -> str:
    return text


OTHER_READINGS: tuple[Callable[[str], str], ...] = (words_reversed, repeated)


def demonstrations(texts: Iterable[str], *, share: float, source: random.Random) -> Iterator[dict[str, object]]:
    """With probability `share` a reply is the rewarded one, else any of the others."""
    for text in texts:
        right = source.random() < share
        reply = letters_reversed(text) if right else source.choice(OTHER_READINGS)(text)
        yield {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": reply}],
        }


def rows(split: Split, /, *, share: float, source: random.Random) -> Iterator[dict[str, object]]:
    """Each training sentence comes several times, its reading drawn anew."""
    return demonstrations(sentences(split) * (PASSES if split == "train" else 1), share=share, source=source)


if __name__ == "__main__":
    run_command(rows, share=SHARE, share_of="letters reversed")
