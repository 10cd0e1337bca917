"""The embedded engine with a tap: what it generated is noted where it is made, before HTTP and the rollout service.

Its model is taught in some seconds to think, talk and call a tool as `recorded_engine` does, from random text before
it; its weights are swapped every few steps of decoding, so that completions have tokens of several versions.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from aiohttp import web
from transformers import Qwen3Config, Qwen3ForCausalLM

from character_tokenizer import ALPHABET, END
from http_servers import serving_http
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.engine import GenerateRequest, HostVersion, TokenChunk
from meshrl.inference.http.app import InferenceServer
from meshrl.models.state import hf_state
from recorded_engine import Generated, RecordedEngine

SESSION: ContextVar[str] = ContextVar("session")
SWAP_EVERY_S = 0.25
MAX_MODEL_LEN = 2048
LESSON = 768  # tokens of a row of the lessons: as long as most conversations get


def taught(tokenizer: Any, *, steps: int, seed: int = 0) -> Qwen3ForCausalLM:
    """A tiny model that replies as `RecordedEngine` would, whatever was said before."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=MAX_MODEL_LEN, tie_word_embeddings=True,
        eos_token_id=END, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model, teacher, draw = Qwen3ForCausalLM(config), RecordedEngine(tokenizer, seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def row() -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < LESSON:
            said = "".join(draw.choices(ALPHABET, k=draw.choice((5, 20, 80, 320))))
            before = tokenizer.encode(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
            reply = [*teacher._reply(), END]
            ids += [*before, *reply]
            labels += [*[-100] * len(before), *reply]
        return ids[:LESSON], labels[:LESSON]

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / (steps / 3))
        rows = [row() for _ in range(4)]
        loss = model(
            input_ids=torch.tensor([ids for ids, _ in rows]), labels=torch.tensor([labels for _, labels in rows])
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class TappedEngine(EmbeddedEngine):
    """Notes each completion, by the session of its HTTP request."""

    generated: defaultdict[str, list[Generated]]
    url: str = ""
    swaps: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        async for chunk in super().generate(request):
            ids += chunk.token_ids.tolist()
            logprobs += chunk.logprobs.tolist()
            for span in chunk.version_spans:
                versions += [span.version] * (span.end - span.start)
            if chunk.finish_reason is not None:
                made = Generated(list(request.prompt_ids), ids, np.array(logprobs, np.float32), versions)
                self.generated[SESSION.get()].append(made)
            yield chunk

    async def swap_often(self, seed: int) -> None:
        """A new version of slightly other weights, again and again, under whatever is running."""
        draw = torch.Generator().manual_seed(seed)
        base = {name: tensor.clone() for name, tensor in hf_state(self.model).items()}
        while True:
            await asyncio.sleep(SWAP_EVERY_S)
            self.swaps += 1
            other = {
                name: tensor + 1e-3 * tensor.abs().mean() * torch.randn(tensor.shape, generator=draw)
                for name, tensor in base.items()
            }
            await self.stage(HostVersion(version=self.swaps, tensors=other))
            await self.pause()
            await self.apply(self.swaps, b"")
            await self.resume()


@web.middleware
async def noting_the_session(request: web.Request, handler: Any) -> web.StreamResponse:
    SESSION.set(request.headers.get("X-Session-ID", ""))
    response: web.StreamResponse = await handler(request)
    return response


@asynccontextmanager
async def serving(model: Qwen3ForCausalLM, seed: int) -> AsyncIterator[TappedEngine]:
    engine = TappedEngine(model, max_model_len=MAX_MODEL_LEN, num_slots=32, eos_token_ids=(END,), seed=seed, version=0)
    engine.model, engine.generated = model, defaultdict(list)
    engine.start()
    app = InferenceServer(engine, model_name="policy", codec=None).app()
    app.middlewares.append(noting_the_session)
    swapping = asyncio.create_task(engine.swap_often(seed))
    try:
        async with serving_http(app, handler_cancellation=True, access_log=None) as engine.url:
            yield engine
    finally:
        swapping.cancel()
        await asyncio.wait({swapping})
        await engine.close()
