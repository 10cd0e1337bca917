"""Measures how the routers of a mixture of experts spread a step's tokens.

For N tokens, E experts of a layer and k of them for each token:

    max_vio                max_e(n_e) / mean_e(n_e) - 1, n_e the tokens that went to expert e; 0 is an even load, and
                           E / k - 1 all tokens at the same experts (maximal violation, arXiv 2408.15664,
                           "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts")
    routing_confidence     mean over the tokens of the softmax probability that the router gives the k experts together
    router_replay_tokens   share of the tokens whose choice was given to the router
    router_replay_changed  share of those tokens' k experts each that the router would not have chosen itself

All are means over the layers that have routers, with the tokens of all ranks and rows; the last two are of router
replay alone, and the confidence of routers that have logits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.models.routers import RouterChoice, Routers
from meshrl.training.parallel.rank_group import RankGroup

_SUMS = 5  # behind the loads: tokens, those with logits, their confidence, choices that were given, and changed by it


class RoutingWatch:
    """Counts since `begin` what the routers of a model choose.

    `tokens`: how many of a row's tokens count, with padding after them; None counts all.
    """

    def __init__(self, routers: Routers) -> None:
        self.tokens: int | None = None
        self._experts = routers.experts
        self._counts: list[torch.Tensor | None] = [None] * len(self._experts)  # (E + 5,)
        if self._experts:
            routers.watchers.append(self._look)

    def begin(self) -> None:
        self._counts = [None] * len(self._counts)

    def counts(self) -> NDArray[np.float64]:
        """This rank's counts since `begin`, all routers in one row; counts of several passes may be added."""
        own = [
            np.zeros(experts + _SUMS) if counts is None else counts.cpu().numpy()
            for counts, experts in zip(self._counts, self._experts, strict=True)
        ]
        return np.concatenate(own or [np.zeros(0)])

    def metrics(self, counts: NDArray[np.float64], parallel: RankGroup) -> dict[str, float]:
        """The metrics of all ranks' `counts`; collective. Empty without routers."""
        if not self._experts:
            return {}
        summed = parallel.sum(counts)
        ends = np.cumsum([experts + _SUMS for experts in self._experts])
        layers = [(layer[:-_SUMS], *layer[-_SUMS:]) for layer in np.split(summed, ends[:-1])]
        seen = [layer for layer in layers if layer[1] > 0]
        shares = {
            "max_vio": [loads.max() / loads.mean() - 1.0 for loads, *_ in seen],
            "routing_confidence": [
                confidence / with_logits for *_, with_logits, confidence, _, _ in seen if with_logits
            ],
        }
        if any(given for *_, given, _ in seen):
            shares["router_replay_tokens"] = [given / loads.sum() for loads, *_, given, _ in seen]
            shares["router_replay_changed"] = [changed / given for *_, given, changed in seen if given]
        return {f"{name}/mean": float(np.mean(values)) for name, values in shares.items() if values}

    @torch.no_grad()
    def _look(self, choice: RouterChoice) -> None:
        experts, chosen_NK = choice.experts, choice.chosen[: self.tokens]
        counts = torch.zeros(experts + _SUMS, dtype=torch.float64, device=chosen_NK.device)
        # Not bincount, for which the host waits. Integers are counted on GPUs alone.
        chosen = chosen_NK.flatten().to(torch.int32 if chosen_NK.is_cuda else torch.float32)
        counts[:experts] = torch.histc(chosen, bins=experts, min=0, max=experts - 1)
        counts[experts] = len(chosen_NK)
        if choice.logits is not None:
            counts[experts + 1] = len(chosen_NK)
            probabilities_NE = choice.logits[: self.tokens].float().softmax(dim=-1)
            counts[experts + 2] = probabilities_NE.gather(-1, chosen_NK).sum()
        if choice.given is not None and choice.own is not None:
            given_NK = choice.given[: self.tokens] >= 0
            changed_NK = (chosen_NK[:, :, None] != choice.own[: self.tokens, None, :]).all(dim=-1)
            counts[experts + 3] = given_NK.sum()
            counts[experts + 4] = (changed_NK & given_NK).sum()
        before = self._counts[choice.router]
        self._counts[choice.router] = counts if before is None else before + counts
