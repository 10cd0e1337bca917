"""A server that speaks the Hugging Face hub's API over HTTP, for what `huggingface_hub`, transformers and datasets ask.

It serves the folders below `root` (`models/OWNER/NAME`, `datasets/OWNER/NAME`). Point HF_ENDPOINT at it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from http_servers import serving_http


class HubServer:
    """Repositories as folders, one revision each. `cut` breaks files off in the middle."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = ""
        self.cut = False
        self.downloads: list[str] = []

    def files(self, kind: str, repo: str) -> dict[str, Path]:
        """Files of a repository by their path in it. Raises: HTTPNotFound without one."""
        folder = self.root / kind / repo
        if not folder.is_dir():
            raise missing("RepoNotFound")
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def commit_of(self, kind: str, repo: str) -> str:
        return digest(b"".join(path.read_bytes() for path in self.files(kind, repo).values()))

    def app(self) -> web.Application:
        app = web.Application()
        for kind, prefix in (("models", ""), ("datasets", "/datasets")):
            api = f"/api/{kind}/{{repo:[^/]+/[^/]+}}"
            app.router.add_get(
                f"{prefix}/{{repo:[^/]+/[^/]+}}/resolve/{{revision}}/{{path:.+}}", self._on(kind, self._file)
            )
            app.router.add_get(f"{api}/tree/{{revision}}", self._on(kind, self._tree))
            app.router.add_get(f"{api}/tree/{{revision}}/{{path:.*}}", self._on(kind, self._tree))
            app.router.add_post(f"{api}/paths-info/{{revision}}", self._on(kind, self._paths))
            app.router.add_get(f"{api}/revision/{{revision}}", self._on(kind, self._info))
            app.router.add_get(api, self._on(kind, self._info))
        return app

    def _on(self, kind: str, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            repo = request.match_info["repo"]
            revision = request.match_info.get("revision", "main")
            if revision not in ("main", self.commit_of(kind, repo)):
                raise missing("RevisionNotFound")
            answer: web.StreamResponse = await handler(request, kind, repo)
            return answer

        return handle

    async def _file(self, request: web.Request, kind: str, repo: str) -> web.StreamResponse:
        path = self.files(kind, repo).get(request.match_info["path"])
        if path is None:
            raise missing("EntryNotFound")
        if request.method == "GET":
            self.downloads.append(f"{kind}/{repo}/{request.match_info['path']}")
        data = path.read_bytes()
        headers = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": self.commit_of(kind, repo)}
        if self.cut and request.method == "GET":
            half = web.StreamResponse(headers={**headers, "Content-Length": str(len(data))})
            await half.prepare(request)
            await half.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.close()
            return half
        return web.Response(body=data, headers=headers, content_type="application/octet-stream")

    async def _info(self, _request: web.Request, kind: str, repo: str) -> web.Response:
        names = [{"rfilename": name} for name in self.files(kind, repo)]
        commit = self.commit_of(kind, repo)
        return web.json_response(
            {"_id": commit[:24], "id": repo, "sha": commit, "siblings": names, "private": False, "tags": [],
             "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z", "gated": False, "disabled": False}
        )  # fmt: skip

    async def _tree(self, request: web.Request, kind: str, repo: str) -> web.Response:
        folder = request.match_info.get("path", "").strip("/")
        below = f"{folder}/" if folder else ""
        files = {name: path for name, path in self.files(kind, repo).items() if name.startswith(below)}
        if folder and not files:
            raise missing("EntryNotFound")
        if request.query.get("recursive", "").lower() in ("true", "1"):
            folders = {str(parent) for name in files for parent in Path(name).parents} - {".", folder}
            entries = [entry(name, path) for name, path in files.items()]
        else:
            folders = {below + name[len(below) :].split("/")[0] for name in files if "/" in name[len(below) :]}
            entries = [entry(name, path) for name, path in files.items() if "/" not in name[len(below) :]]
        entries += [{"type": "directory", "path": each, "oid": digest(each.encode()), "size": 0} for each in folders]
        return web.json_response(entries)

    async def _paths(self, request: web.Request, kind: str, repo: str) -> web.Response:
        asked = (await request.post()).getall("paths") if request.content_type != "application/json" else None
        paths = asked if asked is not None else (await request.json())["paths"]
        files = self.files(kind, repo)
        found = [entry(str(name), files[str(name)]) for name in paths if name in files]
        found += [
            {"type": "directory", "path": name, "oid": digest(str(name).encode()), "size": 0}
            for name in paths
            if name not in files and any(each.startswith(f"{name}/") for each in files)
        ]
        return web.json_response(found)


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def entry(name: str, path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"type": "file", "path": name, "oid": digest(data), "size": len(data)}


def missing(code: str) -> web.HTTPNotFound:
    """What the hub says of a repository, revision or file that is not there."""
    return web.HTTPNotFound(headers={"X-Error-Code": code, "X-Error-Message": code})


@asynccontextmanager
async def serving_hub(root: Path) -> AsyncIterator[HubServer]:
    hub = HubServer(root)
    async with serving_http(hub.app()) as hub.url:
        yield hub
