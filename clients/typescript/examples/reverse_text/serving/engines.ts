/** The engines that a weight hub lists, which version each serves, and one chat call with the tokens that training needs. */

import type { Client } from "@connectrpc/connect";
import { weightsClient } from "meshrl-client";
import type { WeightSync } from "meshrl-client/gen/meshrl/v1/weights_pb.js";
import { refusal } from "./refusals.js";
import type { ChatMessage } from "./environment.js";

const LOOK_MS = 2_000;

export interface Engine {
  url: string;
  version: bigint;
  logprobsMode: string;
  slots: number | undefined;
}

export interface VersionWish {
  minVersion?: bigint;
  exactVersion?: bigint;
}

/** One completion with what it was sampled from and by. Logprobs and spans are over the sampled tokens. */
export interface Completion {
  promptIds: number[];
  tokenIds: number[];
  logprobs: number[];
  versionSpans: { start: number; end: number; version: bigint }[];
  promptVersion: bigint | undefined;
  text: string;
  finishReason: string;
}

interface ChatChoice {
  token_ids?: number[];
  version_spans?: [number, number, number][];
  prompt_version?: number | null;
  message: { content: string };
  finish_reason: string | null;
  logprobs: { content: { logprob: number }[] } | null;
}

/** Keeps the list of engines up to date until `close`. */
export class Engines {
  known: Engine[] = [];
  private turn = 0;
  private readonly hub: Client<typeof WeightSync>;
  private readonly timer: NodeJS.Timeout;
  private looking: Promise<void> | undefined;

  constructor(hub: string, lookEveryMs = 1_000) {
    this.hub = weightsClient(hub);
    this.timer = setInterval(() => void this.look(), lookEveryMs);
  }

  close(): void {
    clearInterval(this.timer);
  }

  /** Asks the hub for its engines, and each of them for its version. What does not answer is not listed. */
  look(): Promise<void> {
    this.looking ??= this.lookNow().finally(() => (this.looking = undefined));
    return this.looking;
  }

  private async lookNow(): Promise<void> {
    try {
      const { engines } = await this.hub.listEngines({}, { timeoutMs: LOOK_MS });
      const asked = engines.filter((engine) => engine.routable).map((engine) => versionOf(engine.url));
      this.known = (await Promise.all(asked)).filter((engine) => engine !== undefined);
    } catch {
      this.known = []; // a hub that is away lists none
    }
  }

  /** An engine that satisfies the wish, each in its turn. Throws VERSION_NOT_AVAILABLE. */
  async pick(wish: VersionWish): Promise<Engine> {
    const fits = (): Engine[] =>
      this.known.filter(
        ({ version }) => version >= (wish.minVersion ?? 0n) && version === (wish.exactVersion ?? version),
      );
    if (!fits().length) await this.look();
    const found = fits();
    const engine = found[this.turn++ % Math.max(1, found.length)];
    if (engine) return engine;
    const wanted = wish.exactVersion ?? `${wish.minVersion ?? 0n} or newer`;
    const message = `no engine serves version ${wanted}; ${this.known.length} are known to the hub`;
    throw refusal("VERSION_NOT_AVAILABLE", message, { retryAfterS: 0.2 });
  }
}

async function versionOf(url: string): Promise<Engine | undefined> {
  try {
    const answer = await fetch(new URL("/version", url), { signal: AbortSignal.timeout(LOOK_MS) });
    const told = (await answer.json()) as { version: number | null; logprobs_mode?: string; slots?: number };
    if (!answer.ok || told.version === null) return undefined;
    return { url, version: BigInt(told.version), logprobsMode: told.logprobs_mode ?? "", slots: told.slots };
  } catch {
    return undefined;
  }
}

/** Has an engine answer a chat. Throws ENGINE_FAILED for whatever keeps it from that. */
export async function chat(
  engine: Engine,
  messages: ChatMessage[],
  sampling: Record<string, number | number[]>,
  signal: AbortSignal,
): Promise<Completion> {
  const headers: Record<string, string> = { "Content-Type": "application/json" };
  if (process.env["MESHRL_API_KEY"]) headers["Authorization"] = `Bearer ${process.env["MESHRL_API_KEY"]}`;
  const body = JSON.stringify({ messages, ...sampling, logprobs: true, return_token_ids: true });
  let answer: Response;
  try {
    answer = await fetch(new URL("/v1/chat/completions", engine.url), { method: "POST", headers, body, signal });
  } catch (error) {
    if (signal.aborted) throw error;
    throw refusal("ENGINE_FAILED", `${engine.url}: ${String(error)}`);
  }
  if (!answer.ok) throw refusal("ENGINE_FAILED", `${engine.url} answers ${answer.status}: ${await answer.text()}`);
  const told = (await answer.json()) as { prompt_token_ids?: number[]; choices: ChatChoice[] };
  const choice = told.choices[0];
  const entries = choice?.logprobs?.content;
  if (!choice?.token_ids || !choice.version_spans || !told.prompt_token_ids || !entries) {
    const message = "a chat answer has no token_ids, logprobs or version_spans, without which nothing can train on it";
    throw refusal("ENGINE_FAILED", `${engine.url}: ${message}; use an engine that gives them`);
  }
  return {
    promptIds: told.prompt_token_ids,
    tokenIds: choice.token_ids,
    logprobs: entries.map((entry) => entry.logprob),
    versionSpans: choice.version_spans.map(([start, end, version]) => ({ start, end, version: BigInt(version) })),
    promptVersion: choice.prompt_version == null ? undefined : BigInt(choice.prompt_version),
    text: choice.message.content,
    finishReason: choice.finish_reason ?? "",
  };
}
