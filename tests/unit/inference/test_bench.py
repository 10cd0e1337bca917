"""`inference --bench`: what an engine makes alone, on requests that are made up."""

import asyncio
import json
from pathlib import Path

import pytest

from inference_kit import make_model
from meshrl.inference.bench import bench, fake_requests
from meshrl.inference.config import EngineBenchConfig, InferenceConfig
from meshrl.inference.embedded.engine import EmbeddedEngine


def config(folder: Path, **changes: object) -> InferenceConfig:
    make_model().save_pretrained(folder / "model")
    return InferenceConfig.model_validate(
        {
            "model": {"name": str(folder / "model"), "device": "cpu"},
            "engine": "embedded",
            "max_num_seqs": 4,
            "max_model_len": 64,
            "kv_cache_bytes": 2**20,
            "output_dir": str(folder),
            **changes,
        }
    )


async def test_the_engine_is_measured_and_the_numbers_are_where_rl_looks(tmp_path: Path) -> None:
    settings = EngineBenchConfig(requests=10, group_size=4, prompt_tokens=12, min_tokens=3, max_tokens=9)
    assert await bench(config(tmp_path), settings, asyncio.Event()) == 0
    found = json.loads((tmp_path / "bench" / "inference.json").read_text())
    assert (found["requests"], found["concurrency"], found["prompt_tokens"]) == (10, 4, 120)
    assert 30 <= found["sampled_tokens"] <= 90
    assert found["tokens_per_s"] == pytest.approx(found["sampled_tokens"] / found["seconds"])
    assert 0.0 <= found["tail"] <= 1.0
    assert found["settings"]["group_size"] == 4


async def test_requests_that_the_engine_cannot_take_are_said_before_any_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineBenchConfig(prompt_tokens=60, max_tokens=5)
    assert await bench(config(tmp_path), settings, asyncio.Event()) == 2
    assert not (tmp_path / "bench").exists()


def test_groups_share_a_prompt_and_lengths_are_drawn() -> None:
    engine = EmbeddedEngine(make_model(), max_model_len=64, num_slots=2)
    settings = EngineBenchConfig(requests=6, group_size=3, prompt_tokens=8, min_tokens=2, max_tokens=20)
    made = fake_requests(settings, engine, vocab_size=40)
    assert [one.prompt_ids == made[0].prompt_ids for one in made] == [True] * 3 + [False] * 3
    assert len({one.sampling.max_tokens for one in made}) > 1
    assert all(2 <= one.sampling.max_tokens <= 20 == settings.max_tokens for one in made)
    assert made == fake_requests(settings, engine, vocab_size=40)
