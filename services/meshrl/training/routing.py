"""Measures how the routers of a mixture of experts spread a step's tokens; used by the learner for its metrics.

For N tokens, E experts of a layer and k of them for each token:

    max_vio             max_e(n_e) / mean_e(n_e) - 1, n_e the tokens that went to expert e; 0 is an even load, and
                        E / k - 1 all tokens at the same experts (maximal violation, arXiv 2408.15664,
                        "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts")
    routing_confidence  mean over the tokens of the softmax probability that the router gives the k experts together

Both are means over the layers that have routers, with the tokens of all ranks and rows. A block that torch.compile has
compiled reports nothing about its routers.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from meshrl.training.parallel.rank_group import RankGroup


class RoutingWatch:
    """Counts since `begin` what passes through the routers of a model; nothing for a model without.

    `tokens`: how many of a row's tokens count, the others being padding after them; None counts all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tokens: int | None = None
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        self._counts: list[torch.Tensor | None] = [None] * len(routers)  # (E + 2,): loads, confidence, tokens
        self._experts = [len(next(matrix for matrix in router.parameters() if matrix.ndim == 2)) for router in routers]
        for place, router in enumerate(routers):
            router.register_forward_hook(partial(self._look, place))

    def begin(self) -> None:
        """Forgets what has passed so far."""
        self._counts = [None] * len(self._counts)

    def counts(self) -> NDArray[np.float64]:
        """What this rank has counted since `begin`, all routers in one row; counts of several passes may be added."""
        own = [
            np.zeros(experts + 2) if counts is None else counts.cpu().numpy()
            for counts, experts in zip(self._counts, self._experts, strict=True)
        ]
        return np.concatenate(own or [np.zeros(0)])

    def metrics(self, counts: NDArray[np.float64], parallel: RankGroup) -> dict[str, float]:
        """The metrics of all ranks' `counts`, the same on each; every rank calls it. Empty where no router was seen."""
        if not self._experts:
            return {}
        summed = parallel.sum(counts)
        ends = np.cumsum([experts + 2 for experts in self._experts])
        layers = [layer for layer in np.split(summed, ends[:-1]) if layer[-1] > 0]
        if not layers:
            return {}
        return {
            "max_vio/mean": float(np.mean([layer[:-2].max() / layer[:-2].mean() - 1.0 for layer in layers])),
            "routing_confidence/mean": float(np.mean([layer[-2] / layer[-1] for layer in layers])),
        }

    @torch.no_grad()
    def _look(self, place: int, router: nn.Module, inputs: object, output: object) -> None:
        """A router's hook: of its three outputs one is the chosen experts (N, k), one the logits (N, E)."""
        if torch.compiler.is_compiling() or not isinstance(output, tuple):
            return
        experts = self._experts[place]
        chosen_NK = next((one for one in output if not one.is_floating_point()), None)
        logits_NE = next((one for one in output if one.is_floating_point() and one.shape[-1] == experts), None)
        if chosen_NK is None or logits_NE is None:
            return
        chosen_NK, logits_NE = chosen_NK[: self.tokens], logits_NE[: self.tokens]
        probabilities_NE = logits_NE.float().softmax(dim=-1)
        counts = torch.zeros(experts + 2, dtype=torch.float64, device=logits_NE.device)
        counts[:experts] = torch.bincount(chosen_NK.flatten(), minlength=experts)[:experts]
        counts[experts] = probabilities_NE.gather(-1, chosen_NK).sum()
        counts[experts + 1] = len(chosen_NK)
        before = self._counts[place]
        self._counts[place] = counts if before is None else before + counts
