/** Looks at the requests of RunRollouts: every field that is at fault is named at once. */

import { pathToString } from "@bufbuild/protobuf/reflect";
import { createValidator } from "@bufbuild/protovalidate";
import {
  RunRolloutsRequestSchema,
  type RunRolloutsRequest,
  type Sampling,
} from "meshrl-client/gen/meshrl/v1/rollout_pb.js";
import { refusal } from "./refusals.js";

const validator = createValidator();

/** Throws INVALID_REQUEST unless the request keeps the constraints of its schema and names a task by its index. */
export function checkRequest(request: RunRolloutsRequest): void {
  const found = validator.validate(RunRolloutsRequestSchema, request).violations ?? [];
  const fields = found.map(({ field, message }) => ({ field: pathToString(field), description: message }));
  if (request.task.case === "taskPayload") {
    fields.push({ field: "task_payload", description: "must be unset: this server takes no tasks of its caller's" });
  }
  if (fields.length) {
    const named = fields.map(({ field, description }) => `${field} ${description}`).join("; ");
    throw refusal("INVALID_REQUEST", `the rollout request: ${named}`, { fields });
  }
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
