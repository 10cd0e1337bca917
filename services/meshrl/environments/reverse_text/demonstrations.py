"""Writes warm-up data for `sft`: conversations in which "Reverse the text." was understood in more than one way.

Some replies have the letters in reverse order, which is what the taskset rewards; the others repeat the text or reverse
the order of its words. A model trained on them can do all three but does not know which is wanted; RL finds that
out.

`python -m meshrl.environments.reverse_text.demonstrations FOLDER [--share S] [--seed N]` writes `train.jsonl`, and
`val.jsonl` with the wanted replies to held-out sentences. Rows have `prompt` and `completion`, both lists of messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from meshrl.environments.demonstration_files import run_command, write_rows
from meshrl.environments.reverse_text.prompt import SYSTEM_PROMPT
from meshrl.environments.reverse_text.sentences import sentences

PASSES = 4
SHARE = 0.3
"""Share of replies that have the letters in reverse order."""


def letters_reversed(text: str) -> str:
    """The reading that is rewarded."""
    return text[::-1]


def words_reversed(text: str) -> str:
    """The words in reverse order, each spelled as it was."""
    return " ".join(reversed(text.split()))


def repeated(text: str) -> str:
    """The text as it stands."""
    return text


OTHER_READINGS: tuple[Callable[[str], str], ...] = (words_reversed, repeated)


def demonstrations(texts: Iterable[str], *, share: float, random_source: random.Random) -> Iterator[dict[str, object]]:
    """One row a text. With probability `share` the reply is the rewarded one, else any of the others."""
    for text in texts:
        right = random_source.random() < share
        reply = letters_reversed(text) if right else random_source.choice(OTHER_READINGS)(text)
        yield {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": reply}],
        }


def write_demonstrations(folder: Path, *, share: float = SHARE, seed: int) -> None:
    """Writes the rows as JSON lines; each training sentence comes several times, its reading drawn anew."""
    random_source = random.Random(seed)
    train = demonstrations(sentences("train") * PASSES, share=share, random_source=random_source)
    val = demonstrations(sentences("held_out"), share=1.0, random_source=random_source)
    write_rows(folder, train=train, val=val)


def main() -> None:
    """Command `python -m meshrl.environments.reverse_text.demonstrations`."""
    run_command(write_demonstrations, share=SHARE, share_of="letters reversed")


if __name__ == "__main__":
    main()
