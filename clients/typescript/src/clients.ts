/** Clients of the three services over gRPC, and what is asked of them most: a run's steps, and groups of rollouts. */

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { create, type DescService, type MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient, type Client, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import {
  RolloutService,
  RunRolloutsRequestSchema,
  type RunRolloutsResponse,
} from "./gen/meshrl/v1/rollout_pb.js";
import { TrainerService, type WatchStepsResponse } from "./gen/meshrl/v1/trainer_pb.js";
import { WeightSync } from "./gen/meshrl/v1/weights_pb.js";

export const CONTRACT_VERSION = "1.1";
const MAX_MESSAGE_BYTES = 64 * 2 ** 20;
const PING_INTERVAL_MS = 20_000;
const RECONNECT_MS = [100, 200, 500, 1000, 2000] as const;
const LOST = new Set([Code.Unavailable, Code.Canceled, Code.Aborted, Code.Internal]);

/** Shows the token of the file that MESHRL_TLS_TOKEN names, where it names one; the file is read for each call. */
const withToken: Interceptor = (next) => (request) => {
  const path = process.env["MESHRL_TLS_TOKEN"];
  if (path) request.header.set("Authorization", `Bearer ${readFileSync(path, "ascii").trim()}`);
  return next(request);
};

/** A client of one service at host:port. Calls end after `deadlineMs` where they do not say otherwise. */
export function clientOf<S extends DescService>(service: S, address: string, deadlineMs = 30_000): Client<S> {
  return createClient(
    service,
    createGrpcTransport({
      baseUrl: `http://${address}`,
      defaultTimeoutMs: deadlineMs,
      readMaxBytes: MAX_MESSAGE_BYTES,
      writeMaxBytes: MAX_MESSAGE_BYTES,
      pingIntervalMs: PING_INTERVAL_MS,
      pingTimeoutMs: 10_000,
      interceptors: [withToken],
    }),
  );
}

export const rolloutClient = (address: string): Client<typeof RolloutService> => clientOf(RolloutService, address);
export const trainerClient = (address: string): Client<typeof TrainerService> => clientOf(TrainerService, address);
export const weightsClient = (address: string): Client<typeof WeightSync> => clientOf(WeightSync, address);

export interface WatchOptions {
  /** Run to watch; left out, the trainer's own. */
  runId?: string;
  /** Last revision that was seen; 0 is the whole history. */
  afterRevision?: bigint;
  /** For how long a lost trainer is looked for. */
  reconnectMs?: number;
  signal?: AbortSignal;
}

/**
 * Every event of a run, history first, then live, until the trainer drains or `signal` is aborted. A stream that breaks
 * is opened again from the last revision that was seen, so no event is missed or told twice.
 */
export async function* watchSteps(address: string, options: WatchOptions = {}): AsyncGenerator<WatchStepsResponse> {
  const trainer = trainerClient(address);
  let seen = options.afterRevision ?? 0n;
  let lostAt: number | undefined;
  for (let tries = 0; ; tries += 1) {
    try {
      const request = { runId: options.runId ?? "", afterRevision: seen };
      const call = options.signal ? { timeoutMs: 0, signal: options.signal } : { timeoutMs: 0 };
      for await (const event of trainer.watchSteps(request, call)) {
        if (event.revision <= seen) continue;
        [seen, lostAt, tries] = [event.revision, undefined, 0];
        yield event;
      }
      return;
    } catch (error) {
      if (options.signal?.aborted) return;
      lostAt ??= Date.now();
      const isLost = error instanceof ConnectError && LOST.has(error.code);
      if (!isLost || Date.now() - lostAt > (options.reconnectMs ?? 60_000)) throw error;
    }
    await sleep(RECONNECT_MS[Math.min(tries, RECONNECT_MS.length - 1)]);
  }
}

/** What a group is asked with; ids and a deadline of 60 s are made up where they are left out. */
export type GroupRequest = MessageInitShape<typeof RunRolloutsRequestSchema> & { environment: string };

/** The events of one group as they come: rollouts and failures, then the summary. Ending the loop cancels the group. */
export async function* fetchRollouts(address: string, group: GroupRequest): AsyncGenerator<RunRolloutsResponse> {
  const deadlineS = group.deadlineS ?? 60;
  const request = create(RunRolloutsRequestSchema, {
    requestId: randomUUID(),
    groupId: randomUUID(),
    groupSize: 1,
    task: { case: "taskIndex", value: 0n },
    ...group,
    deadlineS,
  });
  yield* rolloutClient(address).runRollouts(request, { timeoutMs: (deadlineS + 15) * 1000 });
}
