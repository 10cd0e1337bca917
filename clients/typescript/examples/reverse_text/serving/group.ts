/** Plays one group: each rollout is one chat turn with an engine, scored by the environment, streamed when it is done. */

import { randomUUID } from "node:crypto";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { ConnectError } from "@connectrpc/connect";
import { encodeTensor, reasonOf } from "meshrl-client";
import {
  RolloutSchema,
  RunRolloutsResponseSchema,
  type Rollout,
  type RunRolloutsRequest,
  type RunRolloutsResponse,
} from "meshrl-client/gen/meshrl/v1/rollout_pb.js";
import { DataType } from "meshrl-client/gen/meshrl/v1/tensor_pb.js";
import { chat, type Completion, type Engines, type VersionWish } from "./engines.js";
import type { TextEnvironment } from "./environment.js";
import { refusal } from "./refusals.js";
import { engineSampling } from "./requests.js";

/** Why the rollouts that are left end: their deadline has passed, or somebody cancelled them. */
export type Ending = "late" | "cancelled";

/** Called as rollouts end, for the server's counts. */
export interface GroupListener {
  ended(failure?: string): void;
}

export function wishOf(request: RunRolloutsRequest): VersionWish {
  const { policy } = request;
  if (policy.case === "exactVersion") return { exactVersion: policy.value };
  return policy.case === "minVersion" ? { minVersion: policy.value } : {};
}

export class Group {
  readonly stop = new AbortController();
  private left: number;
  private readonly counts = { finished: 0, failed: 0, cancelled: 0, sampledTokens: 0n };

  constructor(
    private readonly request: RunRolloutsRequest,
    private readonly environment: TextEnvironment,
    private readonly engines: Engines,
    private readonly listener: GroupListener,
  ) {
    this.left = request.groupSize;
  }

  /** Ends the rollouts that run; returns how many there were. */
  end(why: Ending): number {
    this.stop.abort(why);
    return this.left;
  }

  /** The events of the group: whichever rollout is over first comes first, the summary last. */
  async *events(): AsyncGenerator<RunRolloutsResponse> {
    const late = setTimeout(() => this.end("late"), this.request.deadlineS * 1000);
    const running = new Map<number, Promise<[number, RunRolloutsResponse | undefined]>>();
    for (let place = 0; place < this.request.groupSize; place += 1) {
      running.set(place, this.one(place).then((event) => [place, event]));
    }
    try {
      while (running.size) {
        const [place, event] = await Promise.race(running.values());
        running.delete(place);
        if (event) yield event;
      }
      yield create(RunRolloutsResponseSchema, { event: { case: "summary", value: this.counts } });
    } finally {
      clearTimeout(late);
      this.end("cancelled");
      await Promise.all(running.values());
    }
  }

  /** One rollout from its call to its event; none where it was cancelled. */
  private async one(place: number): Promise<RunRolloutsResponse | undefined> {
    try {
      const rollout = await this.play(place);
      this.counts.finished += 1;
      this.listener.ended();
      return create(RunRolloutsResponseSchema, { event: { case: "rollout", value: rollout } });
    } catch (error) {
      if (this.stop.signal.aborted && this.stop.signal.reason !== "late") {
        this.counts.cancelled += 1;
        return undefined;
      }
      const reason = this.stop.signal.aborted ? "DEADLINE_PASSED" : reasonOf(error) || "ENVIRONMENT_FAILED";
      this.counts.failed += 1;
      this.listener.ended(reason);
      const message = error instanceof ConnectError ? error.rawMessage : String(error);
      const failure = { rolloutId: randomUUID(), groupId: this.request.groupId, reason, message, retryable: true };
      return create(RunRolloutsResponseSchema, { event: { case: "failure", value: failure } });
    } finally {
      this.left -= 1;
    }
  }

  private async play(place: number): Promise<Rollout> {
    const began = performance.now();
    const index = Number(this.request.task.value);
    const task = this.environment.task(index);
    const wish = wishOf(this.request);
    const engine = await this.engines.pick(wish);
    const sampling = engineSampling(this.request.sampling, place, this.environment.maxTokens);
    const completion = await chat(engine, task.messages, sampling, this.stop.signal);
    const generated = performance.now();
    if (wish.exactVersion !== undefined && completion.versionSpans.some((span) => span.version !== wish.exactVersion)) {
      const message = `the engine changed its version while it sampled with version ${wish.exactVersion}`;
      throw refusal("VERSION_NOT_AVAILABLE", message);
    }
    const parts = task.score(completion.text);
    this.counts.sampledTokens += BigInt(completion.tokenIds.length);
    const total = performance.now();
    return create(RolloutSchema, {
      rolloutId: randomUUID(),
      groupId: this.request.groupId,
      taskKey: String(index),
      environment: this.request.environment,
      episodeId: randomUUID(),
      samples: [sampleOf(completion, sampling.temperature, task.messages.at(-1)?.content ?? "")],
      reward: Object.values(parts).reduce((sum, part) => sum + part, 0),
      rewardParts: parts,
      finishReason: completion.finishReason,
      truncated: completion.finishReason === "length",
      numTurns: 1,
      timingsS: {
        generation: (generated - began) / 1000,
        scoring: (total - generated) / 1000,
        total: (total - began) / 1000,
      },
      completion: completion.text,
      conversations: this.request.conversations ? [conversationOf(task.messages, completion.text)] : [],
    });
  }
}

type SampleInit = NonNullable<MessageInitShape<typeof RolloutSchema>["samples"]>[number];

function sampleOf(completion: Completion, temperature: number, asked: string): SampleInit {
  const before = completion.promptIds.length;
  const zeros = completion.promptIds.map(() => 0);
  const end = before + completion.tokenIds.length;
  return {
    tokenIds: encodeTensor(DataType.INT32, [...completion.promptIds, ...completion.tokenIds]),
    lossMask: encodeTensor(DataType.BOOL, [...zeros, ...completion.tokenIds.map(() => 1)]),
    logprobs: encodeTensor(DataType.FLOAT32, [...zeros, ...completion.logprobs]),
    versionSpans: completion.versionSpans.map((span, place) => ({
      start: span.start + before,
      end: span.end + before,
      version: span.version,
      ...(place === 0 && completion.promptVersion !== undefined ? { promptVersion: completion.promptVersion } : {}),
    })),
    messageSpans: [
      { start: 0, end: before, role: "user", text: asked },
      { start: before, end, role: "assistant", text: completion.text },
    ],
    temperature,
  };
}

function conversationOf(messages: readonly object[], reply: string): string {
  return JSON.stringify({ messages: [...messages, { role: "assistant", content: reply }] });
}
