"""Every metric that a record of a run may hold. `{scope}` is "all" or the name of an environment. A change of a name
reaches every user."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrl.core.metrics.catalogue import Catalogue, Metric, Source

MEAN, MOST, LEAST, SPREAD = "mean", "max", "min", "std"


def _declaring(*sources: Source) -> Callable[..., Metric]:
    def declare(name: str, unit: str, meaning: str, *statistics: str, sent_as: str = "") -> Metric:
        return Metric(name=name, unit=unit, meaning=meaning, filled_by=sources, statistics=statistics, sent_as=sent_as)

    return declare


_orchestrator = _declaring(Source.ORCHESTRATOR)
_trainer = _declaring(Source.TRAINER)
_sft = _declaring(Source.SFT)
_trainer_and_sft = _declaring(Source.TRAINER, Source.SFT)
_orchestrator_and_sft = _declaring(Source.ORCHESTRATOR, Source.SFT)
_orchestrator_and_eval = _declaring(Source.ORCHESTRATOR, Source.EVAL)
_eval = _declaring(Source.EVAL)

ROLLOUTS = (
    _orchestrator("reward/{scope}", "reward", "of the rollouts that came back for the step", MEAN, SPREAD, MOST, LEAST),
    _orchestrator("seq_len/{scope}", "tokens", "prompt and completion of a rollout", MEAN, MOST, LEAST),
    _orchestrator("completion_len/{scope}", "tokens", "tokens of a rollout that the policy sampled", MEAN, MOST, LEAST),
    _orchestrator("is_truncated/{scope}", "share", "rollouts cut off at their token limit", MEAN),
    _orchestrator("num_turns/{scope}", "turns", "model calls of a rollout", MEAN, MOST),
    _orchestrator("empty_rollouts/{scope}", "share", "rollouts in which the policy sampled no token"),
    _orchestrator("repeated_completions/{scope}", "share", "rollouts with the very completion of another task's"),
    _orchestrator("errored_rollouts/{scope}", "share", "of dispatched rollouts that failed or never came back"),
    _orchestrator("reward_parts/{environment}/{part}", "reward", "one reward function of an environment", MEAN),
    _orchestrator("metrics/{environment}/{metric}", "its own", "what an environment measures of its rollouts", MEAN),
    _orchestrator("off_policy/all", "versions", "from a rollout's oldest token to the policy", MEAN, MOST, LEAST),
    _orchestrator("filters/zero_signal", "share", "of judged groups that are dropped for equal rewards"),
    _orchestrator("dropped/{reason}", "rollouts", "dropped since the step before, by reason"),
)

BATCHES = (
    _orchestrator("batch/groups", "groups", "that the step took"),
    _orchestrator("batch/rollouts", "rollouts", "of the batch that are trained"),
    _orchestrator("batch/micro_batches", "micro-batches", "rows of the packed batch"),
    _orchestrator("batch/tokens", "tokens", "in the packed batch"),
    _orchestrator("batch/loss_tokens", "tokens", "of the batch that the loss is over"),
    _orchestrator("batch/packing_efficiency", "share", "of the rows' room that tokens fill"),
    _orchestrator("batch/shared_prefix_ratio", "share", "of the samples' tokens that rows hold once for several"),
    _orchestrator("batch/truncated_samples", "samples", "cut to seq_len"),
    _orchestrator("batch/dropped_samples", "samples", "without a loss token within seq_len"),
    _orchestrator("mixture/{environment}/rollouts", "share", "of the batch's trained rollouts that are of it"),
    _orchestrator("mixture/{environment}/tokens", "share", "of the batch's loss tokens that are of it"),
    _orchestrator("mixture/{environment}/ratio", "share", "of the rollouts, as ratio and group_size ask for"),
    _orchestrator("advantage/all", "advantage", "of the rollouts of the batch", MEAN, SPREAD, MOST, LEAST),
)

RUN = (
    _orchestrator("progress/tokens", "tokens", "of trained rollouts since the start of the run"),
    _orchestrator("progress/samples", "rollouts", "trained since the start of the run"),
    _orchestrator("progress/problems", "groups", "trained since the start of the run"),
    _orchestrator("progress/redone", "flag", "1 where the trainer did the step again after a restart"),
    _orchestrator("alert/{alert}", "flag", "1 while the alert of this name lasts: reward_collapse, loop_lag and so on"),
    _orchestrator("progress/epoch/{environment}", "epochs", "passes over the tasks of a finite environment"),
    _orchestrator("policy/active_version", "version", "that the engines serve after the step"),
    _orchestrator(
        "time/wait_for_rollouts",
        "s",
        "the loop waited for groups of rollouts of the step, also while the one before was trained: it may exceed"
        " `time/step`",
    ),
    _orchestrator("time/wait_for_ckpt", "s", "the loop waited for the trainer"),
    _orchestrator("time/sleep_engines", "s", "until the engines slept while the trainer trains"),
    _orchestrator("time/group/{scope}", "s", "from a group's dispatch to its last rollout", MEAN, MOST),
    _orchestrator("perf/rollouts_per_s", "rollouts/s", "that came back, over the wall time of the step"),
    _orchestrator("perf/engines_idle", "share", "of the time in which no rollout of the run was out"),
    _orchestrator("perf/idle_slots", "share", "slots of the rollout services without a rollout of the run, over time"),
    _orchestrator("perf/tail_idle_slots", "share", "the same, of it while the batch waited for its last groups"),
    _orchestrator("perf/inference_tokens_per_s", "tokens/s", "sampled, over the wall time of the step"),
)

VERSIONS = (
    _orchestrator("weights/activated", "flag", "1 where the step's version was activated on the engines"),
    _orchestrator("weights/skipped", "flag", "1 where a later version was activated in its place"),
    _orchestrator("weights/engines", "engines", "that took the version"),
    _orchestrator("weights/commit_s", "s", "from the call to the hub until the version was active"),
    _orchestrator("weights/lag_s", "s", "from the end of the upload until the version was active"),
    _orchestrator("weights/bytes", "bytes", "of the version"),
    _orchestrator("weights/pause_s", "s", "the engines did not decode, at most"),
    _orchestrator(
        "weights/probe_error",
        "nats",
        "of a token, from an engine's logprobs of the version's probe to the trainer's, mean, at most",
    ),
    _orchestrator("weights/prepare_s", "s", "an engine needed to load the version beside the one it serves, at most"),
    _orchestrator("weights/requests_kept", "requests", "in flight that went on with the new version"),
)

EVALUATIONS = (
    _orchestrator_and_eval("eval/{environment}/avg@{k}", "reward", "mean over all scored rollouts, k a task"),
    _orchestrator_and_eval("eval/{environment}/pass@{k}", "share", "tasks with at least one rollout that passes, of k"),
    _orchestrator_and_eval("eval/{environment}/failed", "share", "rollouts that did not finish"),
    _orchestrator_and_eval("eval/{environment}/scored", "rollouts", "that the scores are over"),
    _orchestrator_and_eval("eval/{environment}/asked", "rollouts", "that were asked for"),
    _orchestrator_and_eval("eval/{environment}/reward", "reward", "of the scored rollouts", SPREAD, MOST, LEAST),
    _orchestrator_and_eval("eval/{environment}/seq_len", "tokens", "prompt and completion of a rollout", MEAN),
    _orchestrator_and_eval("eval/{environment}/is_truncated", "share", "rollouts cut off at their token limit", MEAN),
    _orchestrator("eval/{environment}/version", "version", "the oldest that sampled a token of a rollout", LEAST, MOST),
    _orchestrator_and_eval("eval/version", "version", "that was evaluated, or newer"),
    _eval("eval/{environment}/avg@{k}/low", "reward", "lower bound of its 95% interval"),
    _eval("eval/{environment}/avg@{k}/high", "reward", "upper bound of its 95% interval"),
    _eval("eval/{environment}/pass@{k}/low", "share", "lower bound of its 95% interval"),
    _eval("eval/{environment}/pass@{k}/high", "share", "upper bound of its 95% interval"),
    _eval("eval/{environment}/num_turns", "turns", "model calls of a rollout", MEAN),
    _orchestrator("time/eval", "s", "of the whole evaluation"),
)

TRAINING = (
    _trainer_and_sft("loss/mean", "loss", "the whole objective, per loss token"),
    _trainer_and_sft("entropy/{scope}", "nats", "of the policy at the loss tokens", MEAN),
    _trainer_and_sft("optim/grad_norm", "norm", "of the gradient before it is clipped"),
    _trainer_and_sft("optim/lr", "1", "learning rate of the step"),
    _trainer_and_sft("optim/zero_grad_ratio", "share", "parameters whose gradient is zero"),
    _trainer_and_sft("max_vio", "1", "mixtures of experts: load of the busiest expert over the mean, less one", MEAN),
    _trainer_and_sft("routing_confidence", "share", "mixtures of experts: probability of a token's experts", MEAN),
    _trainer_and_sft("perf/throughput", "tokens/s", "trained, without the time spent waiting for a batch"),
    _trainer_and_sft("perf/throughput_per_gpu", "tokens/s", "the same for each device"),
    _trainer_and_sft("perf/mfu", "share", "of the device's peak floating-point rate"),
    _trainer_and_sft("perf/peak_memory", "GiB", "the most that the device's allocator held"),
    _trainer_and_sft("time/forward_backward", "s", "forward and backward passes"),
    _trainer_and_sft("time/save_ckpt", "s", "the checkpoint before this step held training up"),
)

RL_TRAINING = (
    _trainer("router_replay_tokens", "share", "tokens of a batch that go through the experts that engines chose", MEAN),
    _trainer("router_replay_changed", "share", "of their experts, those that the trainer had not chosen", MEAN),
    _trainer("router_replay_mismatch_kl", "nats", "mismatch_kl without replay, of some rows and steps", MEAN),
    _trainer("loss/{term}", "its own", "rl, ce, ref_kl: terms of the objective; others: what the loss measures"),
    _trainer("masked_advantage_positive", "share", "loss tokens that are masked and have a positive advantage", MEAN),
    _trainer("masked_advantage_negative", "share", "loss tokens that are masked and have a negative advantage", MEAN),
    _trainer("mismatch_kl/{scope}", "nats", "estimate of KL(engine || trainer) a loss token", MEAN, SPREAD, MOST),
    _trainer("mismatch_abs/{scope}", "nats", "difference of the engine's and the trainer's logprob", MEAN, MOST),
    _trainer("progress/step", "steps", "that the trainer has done"),
    _trainer("progress/total_tokens", "tokens", "packed and trained, as the trainer's checkpoints count them"),
    _trainer("progress/total_samples", "samples", "trained, as the trainer's checkpoints count them"),
    _trainer("time/train_step", "s", "the trainer's whole step, waiting included", sent_as="time/step"),
    _trainer("time/wait_for_batch", "s", "the trainer waited for the orchestrator's batch"),
    _trainer("time/broadcast_batch", "s", "until every rank had the batch"),
    _trainer("time/optimizer", "s", "the optimizer's step"),
    _trainer("time/wait_for_publication", "s", "for the version before to be sealed"),
    _trainer("time/gather_weights", "s", "until the ranks had a snapshot of the new weights"),
    _trainer("time/publish", "s", "from the snapshot until the hub had sealed the version; beside the next step"),
    _trainer("time/publish_{part}", "s", "of it: probe, snapshot, encode, write, group, stage, seal, wire and keep"),
)

SUPERVISED = (
    _sft("progress/epoch", "epochs", "passes over the data"),
    _sft("progress/num_samples", "samples", "trained since the start of the run"),
    _sft("progress/num_tokens", "tokens", "trained since the start of the run"),
    _sft("progress/{subset}/ratio_samples", "share", "of the samples trained so far that are of a subset or split"),
    _sft("progress/{subset}/ratio_tokens", "share", "of the tokens trained so far that are of a subset or split"),
    _sft("time/load_data", "s", "wait for the step's rows to be read, tokenized and packed"),
    _sft("val/loss", "loss", "mean negative logprob of the validation data's loss tokens"),
)

STEP_TIME = _orchestrator_and_sft(
    "time/step", "s", "from the end of the step before to the end of this one; a record that has it is a step's"
)

SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Rollouts": ROLLOUTS,
    "Batches": BATCHES,
    "The run": (*RUN, STEP_TIME),
    "Weight versions": VERSIONS,
    "Evaluations": EVALUATIONS,
    "Training": TRAINING,
    "Reinforcement learning": RL_TRAINING,
    "Supervised fine-tuning": SUPERVISED,
}

CATALOGUE = Catalogue(metric for section in SECTIONS.values() for metric in section)
