/** A gRPC server for environments: RolloutService with its health, from its port to its drain. */

import http2 from "node:http2";
import type { AddressInfo } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import type { HandlerContext, Interceptor } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { Health, HealthCheckResponse_ServingStatus as Status } from "meshrl-client/gen/grpc/health/v1/health_pb.js";
import { RolloutService } from "meshrl-client/gen/meshrl/v1/rollout_pb.js";
import { atTheDoor, refusal } from "./refusals.js";
import { Engines } from "./engines.js";
import type { TextEnvironment } from "./environment.js";
import { Rollouts } from "./service.js";

const MAX_MESSAGE_BYTES = 64 * 2 ** 20;

export interface ServeOptions {
  environments: readonly TextEnvironment[];
  /** host:port of the weight hub, which lists the engines. */
  hub: string;
  host?: string;
  /** 0 is a free one. */
  port?: number;
  /** Rollouts that run at once. */
  slots?: number;
}

export interface RunningServer {
  port: number;
  /** Takes no new groups, waits for those that run, then closes. */
  drain(graceMs: number): Promise<void>;
}

/** Serves environments until `drain`. */
export async function serve(options: ServeOptions): Promise<RunningServer> {
  const engines = new Engines(options.hub);
  await engines.look();
  const rollouts = new Rollouts(options.environments, engines, options.slots ?? 64);
  const watchers = new Set<() => void>();
  const handler = connectNodeAdapter({
    connect: false,
    grpcWeb: false,
    readMaxBytes: MAX_MESSAGE_BYTES,
    writeMaxBytes: MAX_MESSAGE_BYTES,
    interceptors: [errorsAtTheDoor],
    routes: (router) => {
      router.service(RolloutService, rollouts);
      router.service(Health, healthOf(rollouts, watchers));
    },
  });
  const sessions = new Set<http2.ServerHttp2Session>();
  const server = http2.createServer({ settings: { initialWindowSize: 2 ** 20 } }, handler);
  server.on("session", (session) => {
    sessions.add(session);
    session.on("close", () => sessions.delete(session));
  });
  await new Promise<void>((resolve, reject) => {
    server.once("error", reject);
    server.listen(options.port ?? 0, options.host ?? "127.0.0.1", resolve);
  });
  return {
    port: (server.address() as AddressInfo).port,
    async drain(graceMs) {
      rollouts.draining = true;
      for (const tell of watchers) tell();
      for (const end = Date.now() + graceMs; !rollouts.idle && Date.now() < end; ) await sleep(50);
      engines.close();
      for (const session of sessions) session.destroy();
      await new Promise<void>((resolve) => server.close(() => resolve()));
    },
  };
}

/** Health for the service's full name and for the empty one: SERVING until the server drains. */
function healthOf(rollouts: Rollouts, watchers: Set<() => void>) {
  const stateOf = (service: string): { status: Status } => {
    if (service !== "" && service !== RolloutService.typeName) throw refusal("NOT_SUPPORTED", `no service ${service}`);
    return { status: rollouts.draining ? Status.NOT_SERVING : Status.SERVING };
  };
  return {
    check: ({ service }: { service: string }) => stateOf(service),
    async *watch({ service }: { service: string }, { signal }: HandlerContext) {
      for (let last: Status | undefined; !signal.aborted; ) {
        const state = stateOf(service);
        if (state.status !== last) yield state;
        last = state.status;
        await new Promise<void>((resolve) => {
          watchers.add(resolve);
          signal.addEventListener("abort", () => resolve(), { once: true });
        });
      }
    },
  };
}

/** What a handler throws becomes a refusal with details, also in the midst of a stream. */
const errorsAtTheDoor: Interceptor = (next) => async (request) => {
  try {
    const answer = await next(request);
    return answer.stream ? { ...answer, message: guarded(answer.message) } : answer;
  } catch (error) {
    throw atTheDoor(error);
  }
};

async function* guarded<T>(messages: AsyncIterable<T>): AsyncGenerator<T> {
  try {
    yield* messages;
  } catch (error) {
    throw atTheDoor(error);
  }
}
