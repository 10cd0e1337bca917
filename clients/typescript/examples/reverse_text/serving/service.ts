/** RolloutService for environments in TypeScript, as proto/meshrl/v1/rollout.proto and docs/contract.md describe it. */

import type { ServiceImpl } from "@connectrpc/connect";
import { CONTRACT_VERSION } from "meshrl-client";
import type {
  CancelRolloutsRequest,
  ListEnvironmentsRequest,
  RolloutService,
  RunRolloutsRequest,
  RunRolloutsResponse,
} from "meshrl-client/gen/meshrl/v1/rollout_pb.js";
import { refusal } from "./refusals.js";
import type { Engines } from "./engines.js";
import type { TextEnvironment } from "./environment.js";
import { Group, wishOf } from "./group.js";
import { checkRequest } from "./requests.js";

const KEPT_REQUESTS = 10_000;
const KEPT_MS = 600_000;
const OVERLOADED_RETRY_S = 0.5;

export class Rollouts implements Omit<ServiceImpl<typeof RolloutService>, "drain"> {
  draining = false;
  private readonly environments: Map<string, TextEnvironment>;
  private readonly seen = new Map<string, number>(); // request_id -> when it came
  private readonly groups = new Map<string, Group>();
  private readonly failures: Record<string, bigint> = {};
  private running = 0;
  private finished = 0;
  private ends: number[] = []; // of the last minute

  constructor(
    environments: readonly TextEnvironment[],
    private readonly engines: Engines,
    private readonly slots: number,
  ) {
    this.environments = new Map(environments.map((environment) => [environment.name, environment]));
  }

  get idle(): boolean {
    return this.groups.size === 0;
  }

  async listEnvironments({ contractVersion: theirs }: ListEnvironmentsRequest) {
    if (theirs && theirs.split(".")[0] !== CONTRACT_VERSION.split(".")[0]) {
      const message = `this server speaks contract ${CONTRACT_VERSION}, got ${theirs}; run releases of one major version`;
      throw refusal("CONTRACT_MISMATCH", message);
    }
    const environments = [...this.environments.values()].map(({ name, taskset, numTasks, maxTokens }) => ({
      name,
      taskset,
      numTasks: BigInt(numTasks),
      defaultSampling: { temperature: 1, maxTokens },
    }));
    return { contractVersion: CONTRACT_VERSION, environments };
  }

  async *runRollouts(request: RunRolloutsRequest, context: { signal: AbortSignal }): AsyncGenerator<RunRolloutsResponse> {
    const environment = this.admit(request);
    await this.engines.pick(wishOf(request));
    this.admit(request); // another group may have come meanwhile
    const group = new Group(request, environment, this.engines, { ended: (failure) => this.count(failure) });
    this.remember(request.requestId);
    this.groups.set(request.groupId, group);
    this.running += request.groupSize;
    context.signal.addEventListener("abort", () => group.end("cancelled"), { once: true });
    try {
      yield* group.events();
    } finally {
      this.groups.delete(request.groupId);
      this.running -= request.groupSize;
    }
  }

  async cancelRollouts({ groupIds }: CancelRolloutsRequest) {
    const named = [...this.groups].filter(([id]) => !groupIds.length || groupIds.includes(id));
    return { cancelled: named.reduce((sum, [, group]) => sum + group.end("cancelled"), 0) };
  }

  async getRolloutStatus() {
    this.ends = this.ends.filter((end) => end > Date.now() - 60_000);
    return {
      running: this.running,
      finished: BigInt(this.finished),
      failures: this.failures,
      rolloutsPerS: this.ends.length / 60,
      engines: this.engines.known.map(({ slots, ...engine }) => ({
        ...engine,
        healthy: true,
        ...(slots === undefined ? {} : { slots }),
      })),
      draining: this.draining,
      maxConcurrent: this.slots,
    };
  }

  /** The environment of a request that may be played now. */
  private admit(request: RunRolloutsRequest): TextEnvironment {
    if (this.draining) throw refusal("DRAINING", "this server is draining");
    checkRequest(request);
    const environment = this.environments.get(request.environment);
    if (!environment) {
      const hosted = [...this.environments.keys()].join(", ");
      throw refusal("UNKNOWN_ENVIRONMENT", `no environment ${request.environment}; hosted: ${hosted}`);
    }
    if (Number(request.task.value) >= environment.numTasks) {
      throw refusal("UNKNOWN_TASK", `${environment.name} has ${environment.numTasks} tasks, got ${request.task.value}`);
    }
    if (this.seen.has(request.requestId) || this.groups.has(request.groupId)) {
      throw refusal("DUPLICATE_REQUEST", `request ${request.requestId} or its group was seen before`);
    }
    const wantsLogprobs = !request.scoresOnly && isCut(request);
    if (wantsLogprobs && !this.engines.known.some((engine) => engine.logprobsMode === "processed_logprobs")) {
      const message = "no engine reports logprobs of the distribution that this sampling draws from";
      throw refusal("LOGPROBS_BIASED", message);
    }
    if (this.running + request.groupSize > this.slots) {
      const message = `${this.running} of ${this.slots} rollouts run`;
      throw refusal("OVERLOADED", message, { retryAfterS: OVERLOADED_RETRY_S });
    }
    return environment;
  }

  private remember(requestId: string): void {
    const now = Date.now();
    this.seen.set(requestId, now);
    for (const [id, since] of this.seen) {
      if (this.seen.size <= KEPT_REQUESTS && since > now - KEPT_MS) break;
      this.seen.delete(id);
    }
  }

  private count(failure?: string): void {
    if (failure) this.failures[failure] = (this.failures[failure] ?? 0n) + 1n;
    else {
      this.finished += 1;
      this.ends.push(Date.now());
    }
  }
}

/** Whether the sampling draws from another distribution than the model's own. */
function isCut({ sampling }: RunRolloutsRequest): boolean {
  const { temperature = 1, topP = 1, topK = 0, minP = 0 } = sampling ?? {};
  return temperature !== 1 || topP < 1 || topK > 0 || minP > 0;
}
