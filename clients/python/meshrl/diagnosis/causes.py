"""Causes of trouble in a run's metrics, with evidence and the key to change.

`CAUSES` is ranked: a cause stands before its consequences, such as a learning rate of 0 before a flat reward. Each
looks at the last steps alone, so that it ends when they are well again.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.diagnosis.history import Column

RECENT = 5
"""Steps whose mean is "now"."""
BEST = 3
"""Consecutive steps with the run's best mean."""
TREND = 15
"""Fewest steps for a trend."""
MOST_ERRORED = 0.05
MOST_TRUNCATED = 0.3
MOST_EMPTY = 0.3
MOST_MASKED = 0.4
MOST_STALE = 0.3
MOST_REPEATED = 0.5
MOST_ALIKE = 0.9
"""Share of groups with equal rewards, which teach nothing."""
MOST_WAITING = 0.5
MOST_SAVING = 0.25
LEAST_S = 1.0
"""Shorter waits are not worth a change."""
LATE_S = 1.0
COLLAPSED = 0.5
MISMATCH_TIMES = 10.0
MISMATCH_LEAST = 1e-3
GRADIENT_TIMES = 30.0
ENTROPY_SHARE = 0.05
LENGTH_TIMES = 2.5
FALLEN = 0.2
NOISES = 3.0
"""Standard errors by which a mean must move."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """`synchronous`: the trainer waits for each batch by design. `loop_lags_s`: of the programs' event loops.
    `dropped`: rollouts by reason, of a run without a step."""

    columns: Mapping[str, Column]
    synchronous: bool = False
    loop_lags_s: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)

    def values(self, name: str) -> Sequence[float]:
        column = self.columns.get(name)
        return () if column is None else column.values

    def now(self, name: str) -> list[float]:
        """The last RECENT values. Empty if there are fewer, or the newest step lacks it."""
        column, steps = self.columns.get(name), self.columns.get("time/step")
        if column is None or len(column.steps) < RECENT:
            return []
        if steps is not None and steps.steps and column.steps[-1] < steps.steps[-1]:
            return []
        return list(column.values[-RECENT:])

    def trend(self, name: str, least: int = TREND) -> list[float]:
        """All values, if there are `least` and the newest step has one; else empty."""
        values = self.values(name)
        return list(values) if len(values) >= least and self.now(name) else []

    def mean(self, name: str) -> float | None:
        found = self.now(name)
        return statistics.fmean(found) if found else None

    def above(self, name: str, least: float) -> float | None:
        """The mean of `now` if it is above `least`."""
        found = self.mean(name)
        return found if found is not None and found > least else None

    def when(self, name: str) -> str:
        steps = self.columns[name].steps[-RECENT:]
        return f"in steps {steps[0]} to {steps[-1]}"


@dataclass(frozen=True, kw_only=True)
class Ailment:
    """A cause with its evidence in figures, the key to change, and how."""

    cause: str
    symptom: str
    evidence: str
    key: str
    remedy: str

    @property
    def what_to_do(self) -> str:
        """Key and remedy."""
        return f"{self.key}: {self.remedy}" if self.key else self.remedy


@dataclass(frozen=True, kw_only=True)
class Cause:
    """`look` returns the evidence in a sentence, or "". `symptom` is what a user notices, `key` the configuration key
    to change, or ""."""

    name: str
    symptom: str
    key: str
    remedy: str
    look: Callable[[Observed], str]


def diagnose(run: Observed, causes: Sequence[Cause] | None = None) -> list[Ailment]:
    """Those that the run has, in the order of `causes`."""
    return [
        Ailment(cause=cause.name, symptom=cause.symptom, evidence=evidence, key=cause.key, remedy=cause.remedy)
        for cause in (CAUSES if causes is None else causes)
        if (evidence := cause.look(run))
    ]


def _cause(symptom: str, key: str, remedy: str) -> Callable[[Callable[[Observed], str]], Cause]:
    """Names the cause after the function; users see the name."""
    return lambda look: Cause(name=look.__name__, symptom=symptom, key=key, remedy=remedy, look=look)


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


@_cause("rollouts fail", "orchestrator.train.env", "`meshrl rollouts tail --state failed` lists the reasons")
def errored_rollouts(run: Observed) -> str:
    errored = run.values("errored_rollouts/all")
    if errored and errored[-1] > MOST_ERRORED:
        return f"{errored[-1]:.0%} of the rollouts of step {run.columns['errored_rollouts/all'].steps[-1]} failed"
    return ""


@_cause(
    "programs answer late", "",
    "something blocks its event loop, such as an environment: set rollout.workers, and see `meshrl trace`",
)  # fmt: skip
def loop_lag(run: Observed) -> str:
    late = [f"{name} answers {lag_s:.1f} s late" for name, lag_s in sorted(run.loop_lags_s.items()) if lag_s > LATE_S]
    return ", ".join(late)


@_cause(
    "the loss is not a number", "trainer.optim.lr",
    "resume from a checkpoint before that step with a lower rate, and keep trainer.optim.max_norm set",
)  # fmt: skip
def diverged(run: Observed) -> str:
    steps, finite = run.columns.get("time/step"), run.columns.get("optim/grad_norm")
    if steps is None or finite is None or not finite.steps or steps.steps[-1] == finite.steps[-1]:
        return ""
    return f"optim/grad_norm is no finite number since step {finite.steps[-1] + 1}"


@_cause("flat reward", "trainer.optim.lr", "raise it; where trainer.scheduler decays it, give that more steps")
def zero_learning_rate(run: Observed) -> str:
    rates = run.now("optim/lr")
    return f"optim/lr is 0 {run.when('optim/lr')}" if rates and not any(rates) else ""


@_cause(
    "flat reward, zero loss", "orchestrator.train.env",
    "mend the environment's reward: no advantage comes from equal rewards",
)  # fmt: skip
def constant_reward(run: Observed) -> str:
    spread = run.now("reward/all/std")
    if not spread or any(value > 1e-9 for value in spread):
        return ""
    return f"each rollout {run.when('reward/all/std')} earned the same, {run.values('reward/all/mean')[-1]:.4g}"


@_cause(
    "flat reward, replies cut off", "orchestrator.sampling.max_tokens",
    "raise it, with rollout.seq_len and inference.max_model_len",
)  # fmt: skip
def truncation(run: Observed) -> str:
    share = run.above("is_truncated/all/mean", MOST_TRUNCATED)
    if share is None:
        return ""
    longest = run.values("completion_len/all/max")
    length = f", the longest reply has {longest[-1]:.0f} tokens" if longest else ""
    return f"{share:.0%} of the rollouts {run.when('is_truncated/all/mean')} were cut off at their limit{length}"


@_cause("flat reward", "rollout.seq_len", "leave more room after the prompt, and check the chat template's end of turn")
def empty_rollouts(run: Observed) -> str:
    share = run.above("empty_rollouts/all", MOST_EMPTY)
    return "" if share is None else f"{share:.0%} of the rollouts {run.when('empty_rollouts/all')} have no token"


@_cause(
    "zero loss", "trainer.loss.dppo_mask_high",
    "raise it and trainer.loss.dppo_mask_low, or lower trainer.optim.lr or orchestrator.max_async_level",
)  # fmt: skip
def masked_tokens(run: Observed) -> str:
    parts = [run.now(f"masked_advantage_{sign}/mean") for sign in ("positive", "negative")]
    share = sum(statistics.fmean(part) for part in parts if part)
    if share <= MOST_MASKED:
        return ""
    return f"the loss leaves out {share:.0%} of the tokens {run.when('masked_advantage_positive/mean')}"


@_cause(
    "flat reward, few batches", "orchestrator.train.env",
    "choose tasks that the policy solves sometimes, fine-tune it first, or raise orchestrator.sampling.temperature or"
    " orchestrator.group_size",
)  # fmt: skip
def zero_signal(run: Observed) -> str:
    share = run.above("filters/zero_signal", MOST_ALIKE)
    if share is not None:
        mean = run.values("reward/all/mean")[-1]
        return f"{share:.0%} of the groups {run.when('filters/zero_signal')} have equal rewards; the mean is {mean:.4g}"
    alike = run.dropped.get("zero_signal", 0)
    if run.values("time/step") or alike <= MOST_ALIKE * sum(run.dropped.values()):
        return ""
    return f"no step has ended, and {alike} rollouts were dropped since those of their group earned the same"


@_cause("zero loss", "orchestrator.advantage", "check that advantages differ, and that trainer.loss.adv_tau is not 0")
def zero_gradient(run: Observed) -> str:
    norms = run.now("optim/grad_norm")
    if not norms or any(norm > 1e-12 for norm in norms):
        return ""
    spread = run.values("advantage/all/std")
    return f"optim/grad_norm is 0 {run.when('optim/grad_norm')}" + (
        f"; advantage/all/std is {spread[-1]:.3g}" if spread else ""
    )


@_cause("collapse", "trainer.optim.lr", "lower it, or set trainer.optim.max_norm")
def exploding_gradient(run: Observed) -> str:
    norms = run.trend("optim/grad_norm")
    if not norms:
        return ""
    usual, median = statistics.median(norms[:-RECENT]), statistics.median(norms[-RECENT:])
    if median <= GRADIENT_TIMES * usual or median <= 1.0:
        return ""
    return f"optim/grad_norm is {median:.3g} {run.when('optim/grad_norm')}, and was {usual:.3g}"


@_cause(
    "growing mismatch", "trainer.optim.lr",
    "lower it, or orchestrator.max_async_level; where neither helps, compare engine and trainer with `meshrl doctor"
    " --drift`",
)  # fmt: skip
def mismatch_growth(run: Observed) -> str:
    values = run.trend("mismatch_kl/all/mean")
    if not values:
        return ""
    usual, now = statistics.median(values[:-RECENT]), statistics.median(values[-RECENT:])
    if now <= max(MISMATCH_LEAST, MISMATCH_TIMES * usual):
        return ""
    return f"engines and trainer differ: mismatch_kl of the last {RECENT} steps is {now:.2g}, and was {usual:.2g}"


@_cause("collapse", "trainer.optim.lr", "resume from a checkpoint before the fall with a lower rate")
def reward_collapse(run: Observed) -> str:
    rewards = run.trend("reward/all/mean", 2 * RECENT)
    if not rewards:
        return ""
    means = [statistics.fmean(rewards[at : at + BEST]) for at in range(len(rewards) - BEST + 1)]
    best, now = max(means), statistics.fmean(rewards[-RECENT:])
    spread = statistics.pstdev(rewards[means.index(best) : means.index(best) + BEST])
    usual = statistics.median(abs(after - before) for before, after in itertools.pairwise(rewards))
    if best - now <= max(COLLAPSED * abs(best), NOISES * max(spread, usual)):
        return ""
    return f"the mean reward of the last {RECENT} steps is {now:.4g}, after {best:.4g} at its best"


@_cause(
    "collapse", "orchestrator.sampling.temperature",
    "raise it, or lower trainer.optim.lr: the policy explores no more",
)  # fmt: skip
def entropy_collapse(run: Observed) -> str:
    entropy, rewards = run.trend("entropy/all/mean"), run.values("reward/all/mean")
    if not entropy or len(rewards) < TREND:
        return ""
    first, now = statistics.fmean(entropy[:RECENT]), statistics.fmean(entropy[-RECENT:])
    solved = statistics.fmean(rewards[-RECENT:]) >= 0.8 * max(run.values("reward/all/max"), default=0.0)
    if now >= ENTROPY_SHARE * first or solved:
        return ""
    return f"entropy/all/mean is {now:.3g} {run.when('entropy/all/mean')}, and was {first:.3g}"


def _scores(run: Observed) -> dict[str, Column]:
    found = {}
    for name, column in run.columns.items():
        if (match := re.fullmatch(r"eval/(.+)/avg@\d+", name)) and len(column.steps) > 1:
            found[match[1]] = column
    return found


def _mean_at(column: Column, step: int) -> float:
    """Of RECENT steps around one."""
    near = sorted(range(len(column.steps)), key=lambda place: abs(column.steps[place] - step))[:RECENT]
    return statistics.fmean(column.values[place] for place in near)


@_cause(
    "the reward rises, the policy gets worse", "orchestrator.train.env",
    "read the best rollouts (`meshrl rollouts best`), and change the reward or the weights of its parts",
)  # fmt: skip
def reward_hacking(run: Observed) -> str:
    if not run.trend("reward/all/mean"):
        return ""
    reward = run.columns["reward/all/mean"]
    last = statistics.fmean(reward.values[-RECENT:])
    noise = _error(reward.values[-RECENT:])
    for environment, scores in _scores(run).items():
        best = max(range(len(scores.steps)), key=lambda place: scores.values[place])
        then = _mean_at(reward, scores.steps[best])
        fallen = scores.values[best] - scores.values[-1] > FALLEN * abs(scores.values[best])
        if fallen and last - then > max(NOISES * noise, 0.05 * abs(then)):
            return (
                f"the reward rose from {then:.3g} to {last:.3g} since step {scores.steps[best]}, while the held-out"
                f" score of {environment} fell from {scores.values[best]:.3g} to {scores.values[-1]:.3g}"
            )
    return _parts_apart(run, last - statistics.fmean(reward.values[:RECENT]))


def _parts_apart(run: Observed, gained: float) -> str:
    if gained <= 0:
        return ""
    moved: dict[str, list[tuple[str, float, float]]] = {}
    for name, column in run.columns.items():
        match = re.fullmatch(r"reward_parts/([^/]+)/(.+)/mean", name)
        if match and len(column.values) >= TREND:
            ends = statistics.fmean(column.values[:RECENT]), statistics.fmean(column.values[-RECENT:])
            moved.setdefault(match[1], []).append((match[2], *ends))
    for environment, parts in moved.items():
        fell = [part for part in parts if part[1] - part[2] > COLLAPSED * abs(part[1])]
        rose = [part for part in parts if part[2] > part[1] and part not in fell]
        if fell and rose:
            (down, before, after), (up, low, high) = fell[0], max(rose, key=lambda part: part[2] - part[1])
            return (
                f"of {environment}'s reward {up} rose from {low:.3g} to {high:.3g}, while {down} fell from {before:.3g}"
                f" to {after:.3g}"
            )
    return ""


@_cause(
    "replies grow or shrink", "orchestrator.advantage.length_penalty",
    "set it where the reward pays length, and evaluate held-out tasks with orchestrator.eval",
)  # fmt: skip
def length_drift(run: Observed) -> str:
    lengths = run.trend("completion_len/all/mean")
    if not lengths:
        return ""
    first, now = statistics.fmean(lengths[:RECENT]), statistics.fmean(lengths[-RECENT:])
    if first / LENGTH_TIMES < now < first * LENGTH_TIMES:
        return ""
    scores = _scores(run)
    if any(column.values[-1] > column.values[0] for column in scores.values()):
        return ""  # longer replies are better ones
    beside = "and no held-out score rose" if scores else "and no evaluation shows whether they are better"
    return f"replies have {now:.0f} tokens {run.when('completion_len/all/mean')}, and had {first:.0f}, {beside}"


@_cause(
    "the same reply to every task", "orchestrator.train.env",
    "read the best rollouts (`meshrl rollouts best`): the reward pays a reply that ignores the task",
)  # fmt: skip
def repeated_completions(run: Observed) -> str:
    share = run.above("repeated_completions/all", MOST_REPEATED)
    first = list(run.values("repeated_completions/all"))[:RECENT]
    if share is None or statistics.fmean(first) > share / 2:
        return ""  # the tasks have few answers
    return f"{share:.0%} of the replies {run.when('repeated_completions/all')} are those to another task as well"


def _waiting_trainer(run: Observed) -> str:
    waits, steps = run.now("time/wait_for_batch"), run.now("time/train_step")
    warmed_up = len(run.values("time/wait_for_batch")) >= 2 * RECENT  # the first steps wait for engines to start
    if run.synchronous or not warmed_up or not waits or not steps or not sum(steps):
        return ""
    share = min(1.0, sum(waits) / sum(steps))
    if share <= MOST_WAITING or statistics.fmean(waits) <= LEAST_S:
        return ""
    return f"the trainer waited for batches for {share:.0%} of the last {RECENT} steps: sampling is what takes long"


@_cause(
    "idle GPUs of both halves", "orchestrator.max_async_level",
    "raise it, or orchestrator.max_inflight_rollouts where that is set: the engines have room for more",
)  # fmt: skip
def empty_slots(run: Observed) -> str:
    waiting, idle = _waiting_trainer(run), run.above("perf/idle_slots", MOST_WAITING)
    return f"{waiting}, and {idle:.0%} of the slots were idle meanwhile" if waiting and idle is not None else ""


@_cause(
    "idle GPUs of the trainer", "deployment.num_infer_gpus",
    "raise it (without GPUs num_engines, where cores are free), or make the environment faster: the engines are the"
    " slower half",
)  # fmt: skip
def starved_trainer(run: Observed) -> str:
    return "" if empty_slots.look(run) else _waiting_trainer(run)


@_cause(
    "idle GPUs of the engines", "deployment.num_train_gpus",
    "raise it, or move GPUs from the engines: the trainer is the slower half",
)  # fmt: skip
def idle_engines(run: Observed) -> str:
    idle, waits, steps = run.now("perf/idle_slots"), run.now("time/wait_for_ckpt"), run.now("time/step")
    if run.synchronous or not idle or not waits or not steps:
        return ""
    share = min(1.0, sum(waits) / sum(steps))
    if statistics.median(idle) <= MOST_WAITING or share <= MOST_WAITING or statistics.fmean(waits) <= LEAST_S:
        return ""
    return (
        f"{statistics.median(idle):.0%} of the slots were idle {run.when('perf/idle_slots')}, and the run waited for"
        f" the trainer for {share:.0%} of the time"
    )


@_cause(
    "idle GPUs, stale rollouts", "trainer.weight_broadcast",
    "choose a faster transport: files or NCCL on one site, deltas between sites",
)  # fmt: skip
def slow_weights(run: Observed) -> str:
    lags, steps = run.now("weights/lag_s"), run.now("time/step")
    if not lags or not steps or statistics.fmean(lags) <= max(LEAST_S, MOST_WAITING * statistics.fmean(steps)):
        return ""
    lag, step = statistics.fmean(lags), statistics.fmean(steps)
    size = run.values("weights/bytes")
    of = f" for {size[-1] / 2**20:.0f} MiB" if size else ""
    return f"a version takes {lag:.1f} s from the upload to the engines{of}, a step {step:.1f} s"


@_cause(
    "engines serve old weights", "",
    "`meshrl weights engines` lists the one that fell behind, `meshrl logs` its error",
)  # fmt: skip
def stale_engine(run: Observed) -> str:
    engines = run.values("weights/engines")
    if not engines or engines[-1] >= max(engines):
        return ""
    return f"{engines[-1]:.0f} of {max(engines):.0f} engines took the version"


@_cause(
    "rollouts are dropped as too old", "orchestrator.max_off_policy_steps",
    "raise it, or lower orchestrator.max_inflight_rollouts",
)  # fmt: skip
def stale_rollouts(run: Observed) -> str:
    stale, trained = run.now("dropped/stale"), run.now("batch/rollouts")
    if not stale or not trained or not sum(stale):
        return ""
    share = sum(stale) / (sum(stale) + sum(trained))
    if share <= MOST_STALE:
        return ""
    return f"{share:.0%} of the rollouts {run.when('dropped/stale')} were too old to train"


@_cause("slow steps", "ckpt.interval", "raise it, or write checkpoints to a faster disk")
def slow_checkpoints(run: Observed) -> str:
    saving, steps = list(run.values("time/save_ckpt"))[-50:], list(run.values("time/step"))[-50:]
    if len(steps) < TREND or sum(saving) <= MOST_SAVING * sum(steps) or max(saving) <= LEAST_S:
        return ""
    return f"checkpoints held training up for {sum(saving) / sum(steps):.0%} of the last {len(steps)} steps"


@_cause(
    "flat reward", "trainer.optim.lr",
    "raise it, or use a larger orchestrator.batch_size or orchestrator.group_size",
)  # fmt: skip
def flat_reward(run: Observed) -> str:
    rewards = run.trend("reward/all/mean", 2 * TREND)
    if not rewards:
        return ""
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    moved = abs(statistics.fmean(last) - statistics.fmean(first))
    best = max(run.values("reward/all/max"), default=0.0)
    noise = (_error(first) ** 2 + _error(last) ** 2) ** 0.5
    if moved > 2.0 * noise or statistics.fmean(last) >= 0.8 * best:
        return ""
    return (
        f"the mean reward is {statistics.fmean(last):.3g}, and was {statistics.fmean(first):.3g} at first, while single"
        f" rollouts earn {best:.3g}"
    )


CAUSES: tuple[Cause, ...] = (
    errored_rollouts, loop_lag, diverged, zero_learning_rate, constant_reward, empty_rollouts, reward_hacking,
    repeated_completions, length_drift, zero_signal, exploding_gradient, reward_collapse, mismatch_growth,
    entropy_collapse, truncation, masked_tokens, zero_gradient, stale_engine, slow_weights, stale_rollouts,
    empty_slots, starved_trainer, idle_engines, slow_checkpoints, flat_reward,
)  # fmt: skip
