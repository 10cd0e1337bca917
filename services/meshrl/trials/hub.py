"""Pushes the results of a command to the Hugging Face hub, as a dataset; called at the end of a command with --push."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_session
from loguru import logger

from meshrl.core.hub import NO_ANSWER, told
from meshrl.sampling.retry import RunError
from meshrl.trials.config import PushConfig


def push(config: PushConfig, *, default_name: str, files: Sequence[Path], card: str) -> None:
    """Uploads `files` by their names, and `card` as README.md, in one commit. Blocks. Raises RunError.

    The hub is that of HF_ENDPOINT; the token that of HF_TOKEN or of `hf auth login`.
    """
    there = [path for path in files if path.exists() and path.stat().st_size]
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    get_session().timeout = config.timeout_s  # the library itself waits for ever
    try:
        repo = api.create_repo(
            config.repo or default_name, repo_type="dataset", private=config.private, exist_ok=True
        ).repo_id
        additions = [CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path) for path in there]
        additions.append(CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=card.encode()))
        message = f"{len(there)} files of meshrl"
        done = api.create_commit(repo, additions, repo_type="dataset", commit_message=message)
    except (NO_ANSWER, OSError, ValueError) as error:  # refused, unreachable, no token
        raise RunError(
            f"nothing was pushed to the hub: {told(error)}; set HF_TOKEN or run `hf auth login`, check push.repo, and"
            " run the same command again: it plays nothing twice"
        ) from error
    logger.info("pushed to {}", done.commit_url)
