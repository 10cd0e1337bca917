"""The `inference` program with a slow start: its model is loaded only once the file of GATE exists."""

import os
import time
from pathlib import Path

from meshrl.inference.config import InferenceConfig
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.main import main

GATE = "MESHRL_TEST_GATE"
DEADLINE_S = 120.0


def hold_up() -> None:
    from meshrl.inference import build

    load = build.build_engine

    def late(config: InferenceConfig) -> EmbeddedEngine:
        end_s = time.monotonic() + DEADLINE_S
        while not Path(os.environ[GATE]).exists():
            assert time.monotonic() < end_s, f"{GATE} did not open in {DEADLINE_S} s"
            time.sleep(0.02)
        return load(config)

    build.build_engine = late


if __name__ == "__main__":
    hold_up()
    main()
