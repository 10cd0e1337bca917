"""The HTTP server of an engine: routes for tokens, for text, for health and for administration."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from opentelemetry import context as otel_context
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from meshrl.client.idle_connections import IdleConnections
from meshrl.inference.agent.follower import HubFollower
from meshrl.inference.checkpoints import WeightLoader
from meshrl.inference.engine import Engine
from meshrl.inference.http.access import Access
from meshrl.inference.http.admin_routes import AdminRoutes
from meshrl.inference.http.metrics import EngineMetrics
from meshrl.inference.http.openai_routes import OpenAIRoutes
from meshrl.inference.http.runs import STATUS_OF, Serving, as_mesh_error, error_body, served_version
from meshrl.inference.http.token_route import TokenRoute
from meshrl.inference.http.tokenizer import TextCodec
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import TRACEPARENT, context_from

ROUTES = "; this engine serves /v1/chat/completions, /v1/completions, /v1/models and /inference/v1/generate"
MAX_BODY_BYTES = 64 * 2**20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InferenceServer:
    def __init__(
        self, engine: Engine, *, model_name: str, codec: TextCodec | None, base_model: str = "",
        request_deadline_s: float = 600.0, api_key: str | None = None, admin_key: str | None = None,
        follower: HubFollower | None = None,
    ) -> None:  # fmt: skip
        """`base_model`: a folder or name on the Hugging Face hub, whose weights /reload_weights serves again."""
        self._engine = engine
        self._base_model = base_model
        self._follower = follower
        self._access = Access(api_key, admin_key)
        self._started = int(time.time())
        self._serving = Serving(
            engine,
            model_name=model_name,
            request_deadline_s=request_deadline_s,
        )
        self._codec = codec
        self.idle = IdleConnections()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self.idle.middleware, self._guard])
        token_route = TokenRoute(self._serving)
        app.router.add_post("/inference/v1/generate", token_route.handle)
        if self._codec is not None:
            text_routes = OpenAIRoutes(self._serving, self._codec)
            app.router.add_post("/v1/chat/completions", text_routes.chat)
            app.router.add_post("/v1/completions", text_routes.completions)
        else:
            app.router.add_post("/v1/{route:chat/completions|completions}", self._needs_tokenizer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        loader = WeightLoader(self._engine, self._base_model)
        AdminRoutes(self._engine, loader, self._follower).add_to(app.router)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        caller = context_from(request.headers.get(TRACEPARENT, ""))
        token = None if caller is None else otel_context.attach(caller)
        try:
            refused = self._access.refusal(request)
            if refused is not None:
                return _refusal(refused.status, refused.message)
            return await handler(request)
        except MeshError as error:
            return _error_response(error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            served = ROUTES if error.status == 404 else ""
            return _refusal(error.status, f"{request.method} {request.path}: {error.reason}{served}")
        except Exception as error:  # noqa: BLE001 - a defect in a route must not drop the connection without an answer
            return _error_response(as_mesh_error(error, request))
        finally:
            if token is not None:
                otel_context.detach(token)

    async def _needs_tokenizer(self, request: web.Request) -> web.StreamResponse:
        message = (
            f"{request.path} needs a tokenizer, and this model has none; use /inference/v1/generate with token ids"
        )
        raise MeshError(Reason.NOT_SUPPORTED, message)

    # --- what anybody may ask ---------------------------------------------------------------

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._card(), *map(self._card, self._engine.runs)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        if name != self._serving.model_name and not self._serving.policy(name):
            return _refusal(
                404, f"there is no model {name!r:.100} here; this engine serves {self._serving.model_name!r}"
            )
        return web.json_response(self._card(name))

    def _card(self, name: str = "") -> dict[str, object]:
        return {
            "id": name or self._serving.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "meshrl",
            "max_model_len": self._engine.max_model_len,
        }

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        """200 while requests are taken; an engine that waits for its first version is healthy, too."""
        if self._engine.draining:
            return web.json_response({"status": "draining", "in_flight": self._engine.in_flight}, status=503)
        if self._engine.unfit is not None:
            return web.json_response({"status": "unfit", "message": self._engine.unfit}, status=503)
        return web.json_response({"status": "ok"})

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        root, stats, runs = self._engine.root, self._engine.stats(), self._engine.runs
        if len(runs) == 1:
            root = next(iter(runs.values())).root
        follower = self._follower
        return web.json_response(
            {
                "version": served_version(self._engine),
                "runs": {run_id: adapter.version for run_id, adapter in runs.items()},
                "root": root.hex() if root else "",
                "paused": self._engine.paused,
                "in_flight": self._engine.in_flight,
                "logprobs_mode": self._engine.logprobs_mode,
                "slots": stats.slots,
                "kv_tokens": stats.kv_tokens,
                "waiting": stats.waiting,
                "preempted": stats.preempted,
                **({} if follower is None else {"hub": follower.hub, "hub_is_there": follower.connected}),
            }
        )

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        body = generate_latest(EngineMetrics(self._engine))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _refusal(status: int, message: str) -> web.Response:
    kind = {401: "authentication_error", 403: "permission_error"}.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.Response(text=json.dumps({"error": error}), status=status, content_type="application/json")


def _error_response(error: MeshError) -> web.Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    status = STATUS_OF.get(error.reason, 500)
    return web.Response(
        text=json.dumps(error_body(error)), status=status, content_type="application/json", headers=headers
    )
