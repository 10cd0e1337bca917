"""The routers of a mixture of experts as they choose: watched, and made to repeat an engine's choice.

With router replay (R3, arXiv 2510.11370) a token goes through the experts of its sampling. The choice alone is
replayed: a router computes its scores again and gets its gradient through them. Its `torch.topk` of two-dimensional
scores, as wide as there are experts, is answered with the given experts and their scores.
Shapes: N tokens of a forward pass, L routers, E experts of a layer, k of them for each token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from meshrl.models.experts import Experts, expert_layers
from meshrl.wire.types import RoutedShape

UNKNOWN = -1
"""In place of an expert: the router makes its own choice."""

NARROW = ("dbrx", "llama4_text")
"""Families whose experts take no scores of another type than their inputs."""

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterChoice:
    router: int
    experts: int
    chosen: torch.Tensor  # (N, k)
    own: torch.Tensor | None = None  # (N, k) what it would have chosen, where choices were given to it
    given: torch.Tensor | None = None  # (N, k) those choices, UNKNOWN where none was
    logits: torch.Tensor | None = None  # (N, E)


class Routers:
    """The routers of one model: the `experts` of each, its layer, and its holder, the module with router and experts.

    A watcher is called after each choice. Without one, and without routes, they cost nothing.
    """

    def __init__(self, model: PreTrainedModel, *, wide: bool = False) -> None:
        """`wide`: logits are float32 sums of products of the computing type, and not rounded to it."""
        self._wide = wide and model.config.get_text_config().model_type not in NARROW
        self.watchers: list[Callable[[RouterChoice], None]] = []
        self._given: torch.Tensor | None = None
        layers = expert_layers(model, model.config)
        parents = {child: module for module in model.modules() for child in module.children()}
        self.holders = list(dict.fromkeys(parents[layer.module] for layer in layers))
        found = _router_modules(layers, parents)
        self.experts = [experts for _, experts in found]
        names = {module: name for name, module in model.named_modules()}
        self.layers = [int(next(part for part in names[module].split(".") if part.isdigit())) for module, _ in found]
        self.shape = (
            RoutedShape(layers=len(found), per_token=layers[0].per_token, experts=max(self.experts)) if found else None
        )
        for number, (module, _) in enumerate(found):
            module.forward = functools.partial(self._run, number, module.forward)

    @contextmanager
    def replaying(self, routes_NLK: torch.Tensor | None) -> Iterator[None]:
        """Inside, routers choose these experts; their own for UNKNOWN or without routes."""
        before, self._given = self._given, routes_NLK
        try:
            yield
        finally:
            self._given = before

    def as_now(self, function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
        """The function with this moment's routes at each run: for blocks that are computed again."""
        routes = self._given
        if routes is None:
            return function

        def run(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
            with self.replaying(routes):
                return function(*args, **kwargs)

        return run

    def _run(self, number: int, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not (self._wide or self.watchers or self._given is not None):
            return forward(*args, **kwargs)
        given = None if self._given is None else self._given[:, number]
        with _Choosing(self.experts[number], given, wide=self._wide) as choosing:
            output = forward(*args, **kwargs)
        chosen = choosing.chosen
        if chosen is None:  # chosen without topk: by the token's id, or in a way of the family's own
            parts = output if isinstance(output, tuple) else ()
            chosen = next((one for one in parts if torch.is_tensor(one) and not one.is_floating_point()), None)
            if given is not None:
                self._check_unreplayed(number, given, chosen)
        if chosen is not None:
            choice = RouterChoice(
                router=number,
                experts=self.experts[number],
                chosen=chosen.flatten(0, -2),
                own=choosing.own,
                given=None if choosing.own is None else given,
                logits=choosing.logits,
            )
            for watcher in self.watchers:
                watcher(choice)
        return output

    def _check_unreplayed(self, number: int, given_NK: torch.Tensor, chosen_NK: torch.Tensor | None) -> None:
        same = False if chosen_NK is None else given_NK == chosen_NK.flatten(0, -2)
        if not bool(((given_NK < 0) | same).all()):
            raise ValueError(
                f"router replay: router {number} of this model chooses its experts without torch.topk, so no choice"
                " can be given to it; set trainer.enable_router_replay to false"
            )


class _Choosing(TorchFunctionMode):
    """While a router runs: answers its topk with the given experts, and keeps its logits and choice."""

    def __init__(self, experts: int, given_NK: torch.Tensor | None, *, wide: bool = False) -> None:
        super().__init__()
        self._experts, self._wide = experts, wide
        self._given = given_NK
        self.chosen: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._wide and func is F.linear and args[1].shape[0] == self._experts:
            output = _wide_linear(*args, **(kwargs or {}))
        else:
            output = func(*args, **(kwargs or {}))
        if func in (F.linear, torch.matmul, torch.Tensor.matmul):
            if self.logits is None and output.shape[-1] == self._experts:
                self.logits = output.detach().flatten(0, -2)
        elif func in (torch.topk, torch.Tensor.topk):
            scores, (_, own) = args[0], output
            if scores.ndim == 2 and scores.shape[1] == self._experts:
                self.chosen = own
                if self._given is not None:
                    output = self._replayed(scores, own)
        return output

    def _replayed(self, scores_NE: torch.Tensor, own_NK: torch.Tensor) -> Any:
        assert self._given is not None
        if self._given.shape != own_NK.shape:
            raise ValueError(
                f"router replay: routes are for {tuple(self._given.shape)} tokens and experts, and a router chose for "
                f"{tuple(own_NK.shape)}"
            )
        given_NK = self._given.to(own_NK)
        # Where one expert of a token is unknown all are: half of a choice would name an expert twice.
        known_N1 = (given_NK >= 0).all(dim=1, keepdim=True)
        self.own, self.chosen = own_NK, torch.where(known_N1, given_NK, own_NK)
        return torch.return_types.topk((scores_NE.gather(1, self.chosen), self.chosen))


def _wide_linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        bias = None if bias is None else bias.float()
        return F.linear(hidden.to(dtype).float(), weight.to(dtype).float(), bias)


def _router_modules(layers: Sequence[Experts], parents: Mapping[nn.Module, nn.Module]) -> list[tuple[nn.Module, int]]:
    found: list[tuple[nn.Module, int]] = []
    for layer in layers:
        parent = parents[layer.module]
        within = set(layer.module.modules())
        routers = [module for module in parent.modules() if module not in within and _is_router(module)]
        chosen = next((module for module in (*routers, parent) if _calls_topk(module)), [*routers, parent][0])
        if all(chosen is not module for module, _ in found):
            found.append((chosen, layer.count))
    return found


def _is_router(module: nn.Module) -> bool:
    return type(module) is not nn.Linear and type(module).__name__.lower().endswith(("router", "gate", "gating"))


def _calls_topk(module: nn.Module) -> bool:
    try:
        return "topk(" in inspect.getsource(type(module))
    except (OSError, TypeError):  # no source is there to read
        return False
