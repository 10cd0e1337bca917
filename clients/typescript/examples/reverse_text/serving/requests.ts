/** Looks at the requests of RunRollouts: every field that is at fault is named at once. */

import type { RunRolloutsRequest, Sampling } from "meshrl-client/gen/meshrl/v1/rollout_pb.js";
import { refusal, type Violation } from "./refusals.js";

const MAX_ID_CHARS = 256;

/** Throws INVALID_REQUEST unless the request names itself, a task, a size and a deadline, and samples within ranges. */
export function checkRequest(request: RunRolloutsRequest): void {
  const fields: Violation[] = [];
  const check = (holds: boolean, field: string, description: string): void => {
    if (!holds) fields.push({ field, description });
  };
  const ids = { request_id: request.requestId, group_id: request.groupId, environment: request.environment };
  for (const [field, value] of Object.entries(ids)) {
    const length = [...value].length;
    check(length >= 1 && length <= MAX_ID_CHARS, field, `must have 1 to ${MAX_ID_CHARS} characters`);
  }
  check(request.task.case === "taskIndex", "task", "must be a task_index: this server takes no tasks of its caller's");
  check(request.groupSize >= 1, "group_size", "must be at least 1");
  const isDeadline = Number.isFinite(request.deadlineS) && request.deadlineS > 0;
  check(isDeadline, "deadline_s", "must be a positive number of seconds");
  checkSampling(request.sampling, check);
  if (fields.length) {
    const named = fields.map(({ field, description }) => `${field} ${description}`).join("; ");
    throw refusal("INVALID_REQUEST", `the rollout request: ${named}`, { fields });
  }
}

function checkSampling(
  sampling: Sampling | undefined,
  check: (holds: boolean, field: string, description: string) => void,
): void {
  const { temperature = 1, topP = 1, topK = 0, minP = 0, maxTokens = 1, stopTokenIds = [] } = sampling ?? {};
  check(Number.isFinite(temperature) && temperature >= 0, "sampling.temperature", "must be 0 or more");
  check(topP > 0 && topP <= 1, "sampling.top_p", "must be in (0, 1]");
  check(topK >= -1, "sampling.top_k", "must be -1 or more");
  check(minP >= 0 && minP <= 1, "sampling.min_p", "must be in [0, 1]");
  check(maxTokens >= 1, "sampling.max_tokens", "must be at least 1");
  check(stopTokenIds.every((id) => id >= 0), "sampling.stop_token_ids", "must be 0 or more");
}

/** The sampling of one rollout of a group in the words of an engine's HTTP: what the request says over the defaults. */
export function engineSampling(
  sampling: Sampling | undefined,
  place: number,
  maxTokens: number,
): Record<string, number | number[]> & { temperature: number } {
  return {
    temperature: sampling?.temperature ?? 1,
    top_p: sampling?.topP ?? 1,
    top_k: sampling?.topK || -1,
    min_p: sampling?.minP ?? 0,
    max_tokens: sampling?.maxTokens ?? maxTokens,
    stop_token_ids: sampling?.stopTokenIds ?? [],
    ...(sampling?.seed === undefined ? {} : { seed: Number(sampling.seed) + place }),
  };
}
