"""Runs deploy/compose where no container engine runs: the programs of the images, each from its image's root.

    python scripts/run_compose.py [--folder FOLDER]

Needs root, bubblewrap, and the images of scripts/build_images.sh. The compose file gives commands, environment, volumes
and the order of starts; the images give the user and the rest of the environment. As there, a root is read-only, /tmp
is in memory, and a program has no capabilities. All share one network namespace without a way out, in which each has a
loopback address under the name of its service. One-off services (`profiles`) run first. The run ends when a program
ends; the exit code is the orchestrator's, or 1 where a healthcheck never passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

COMPOSE = Path(__file__).parents[1] / "deploy" / "compose" / "compose.yaml"
HEALTH_S, RUN_S, GRACE_S = 180.0, 900.0, 60.0
IN_NAMESPACE = "MESHRL_RUN_COMPOSE_IN_NAMESPACE"


@dataclass(frozen=True, kw_only=True)
class Image:
    """A container that buildah made of an image: where its files are, and what its programs are started with."""

    container: str
    root: Path
    environment: tuple[str, ...]
    user: str
    folder: str


def open_image(name: str) -> Image:
    """Mounts an image. Raises CalledProcessError where buildah lacks it."""
    config = json.loads(output("buildah", "inspect", "--type", "image", f"localhost/{name}"))["Docker"]["config"]
    container = output("buildah", "from", "--pull-never", f"localhost/{name}")
    return Image(
        container=container,
        root=Path(output("buildah", "mount", container)),
        environment=tuple(config["Env"]),
        user=config["User"],
        folder=config["WorkingDir"],
    )


def output(*command: str) -> str:
    environment = {"STORAGE_DRIVER": "vfs", **os.environ}  # as scripts/build_images.sh has it
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300, env=environment)
    return done.stdout.strip()


class Services:
    """The services of the compose file, on their images."""

    def __init__(self, folder: Path) -> None:
        self.specs: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
        self._folder = folder
        self._images = {name: open_image(name) for name in {spec["image"] for spec in self.specs.values()}}
        self._hosts = folder / "hosts"
        addresses = {name: f"127.0.1.{place}" for place, name in enumerate(self.specs, start=1)}
        self._hosts.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))

    def close(self) -> None:
        """Removes the containers; the images stay."""
        output("buildah", "rm", *(image.container for image in self._images.values()))

    def start(self, name: str, command: list[str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Starts a service, or another command in its place."""
        spec, image = self.specs[name], self._images[self.specs[name]["image"]]
        user, group = image.user.split(":")
        sandbox = ["bwrap", "--die-with-parent", "--unshare-uts", "--hostname", name, "--unshare-ipc"]
        sandbox += ["--unshare-pid", "--as-pid-1"]
        sandbox += ["--ro-bind", str(image.root), "/", "--ro-bind", str(self._hosts), "/etc/hosts"]
        sandbox += ["--proc", "/proc", "--dev", "/dev"]
        for path in spec["tmpfs"]:
            sandbox += ["--perms", "1777", "--tmpfs", path]
        for volume in spec["volumes"]:
            sandbox += self._volume(name, image, volume)
        sandbox += ["--chdir", image.folder, "--clearenv"]
        for variable in (*image.environment, *(f"{key}={value}" for key, value in spec.get("environment", {}).items())):
            sandbox += ["--setenv", *variable.split("=", 1)]
        for capability in ("SETUID", "SETGID", "SETPCAP"):
            sandbox += ["--cap-add", f"CAP_{capability}"]  # until the next program has become the user
        become = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
        become += ["--bounding-set=-all", "--inh-caps=-all"]
        words = command or [word.replace("$$", "$") for word in spec["command"]]
        return subprocess.Popen([*sandbox, *become, *words], text=True, **options)

    def _volume(self, name: str, image: Image, volume: str) -> list[str]:
        source, _, rest = volume.partition(":")
        if source.startswith("."):
            path, _, mode = rest.partition(":")
            (image.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)  # of this container alone
            return ["--ro-bind" if mode == "ro" else "--bind", str((COMPOSE.parent / source).resolve()), path]
        path = rest or source
        host = self._folder / (source if rest else name + source.replace("/", "-"))
        if not host.exists():  # a new volume belongs to whom the image's folder belongs
            host.mkdir()
            owner = (image.root / path.lstrip("/")).stat()
            os.chown(host, owner.st_uid, owner.st_gid)
        return ["--bind", str(host), path]

    def well(self, name: str) -> bool:
        """Whether the image's healthcheck passes beside the service."""
        return self.start(name, ["python", "/opt/healthcheck.py"], stderr=subprocess.DEVNULL).wait(30) == 0


def run(services: Services, folder: Path) -> int:
    """Runs the one-off services, then all others until one ends; the orchestrator's exit code, 1 for a sick service."""
    for name in [name for name, spec in services.specs.items() if "profiles" in spec]:
        code = services.start(name).wait(RUN_S)
        print(f"{name} ended with {code}", flush=True)
        if code != 0:
            return code
    began = time.monotonic()
    waiting = [name for name, spec in services.specs.items() if "profiles" not in spec]
    running: dict[str, subprocess.Popen[str]] = {}
    sick = False
    try:
        while waiting:
            name = next(name for name in waiting if services.specs[name].get("depends_on", {}).keys() <= running.keys())
            waiting.remove(name)
            with (folder / f"{name}.log").open("w") as log:
                running[name] = services.start(name, stdout=log, stderr=subprocess.STDOUT)
            print(f"{name} started after {time.monotonic() - began:.1f} s", flush=True)
        for name in running:
            while not (well := services.well(name)) and running[name].poll() is None:
                if time.monotonic() - began > HEALTH_S:
                    break
                time.sleep(1.0)
            print(f"{name} is {'well' if well else 'not well'} after {time.monotonic() - began:.1f} s", flush=True)
            sick = sick or not well
        while all(each.poll() is None for each in running.values()) and time.monotonic() - began < RUN_S:
            time.sleep(0.2)
        print(f"the first program ended after {time.monotonic() - began:.1f} s", flush=True)
    finally:
        codes = stop(running)
    print("exit codes: " + ", ".join(f"{name} {code}" for name, code in codes.items()))
    return codes["orchestrator"] or int(sick)


def stop(running: Mapping[str, subprocess.Popen[str]]) -> dict[str, int]:
    """Ends what still runs by SIGTERM, by SIGKILL after the grace of the compose file."""
    for sandbox in [each for each in running.values() if each.poll() is None]:
        for program in Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split():
            os.kill(int(program), signal.SIGTERM)  # bwrap hands no signals on
    codes = {}
    for name, sandbox in running.items():
        try:
            codes[name] = sandbox.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            sandbox.kill()
            codes[name] = sandbox.wait()
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where volumes and logs are kept; by default a temporary folder")
    read = parser.parse_args()
    if IN_NAMESPACE not in os.environ:
        inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        os.execvpe("unshare", inside, {**os.environ, IN_NAMESPACE: "1"})
    with tempfile.TemporaryDirectory() as scratch:
        folder = (read.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with closing(Services(folder)) as services:
            return run(services, folder)


if __name__ == "__main__":
    sys.exit(main())
