/** The errors with which the service ends calls, as docs/contract.md has them: a gRPC status with google.rpc details. */

import { create } from "@bufbuild/protobuf";
import { DurationSchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "meshrl-client/gen/google/rpc/error_details_pb.js";
import { ERROR_DOMAIN, type Reason } from "meshrl-client";

const MAX_MESSAGE_CHARS = 300; // of up to 3 bytes each: all details stay below 8 KiB
const MAX_FIELDS = 20;

/** The gRPC status of each reason that it gives; the others are in reasons.proto. */
const CODES = {
  INVALID_REQUEST: Code.InvalidArgument,
  UNKNOWN_ENVIRONMENT: Code.NotFound,
  UNKNOWN_TASK: Code.NotFound,
  VERSION_NOT_AVAILABLE: Code.FailedPrecondition,
  LOGPROBS_BIASED: Code.FailedPrecondition,
  OVERLOADED: Code.ResourceExhausted,
  DRAINING: Code.Unavailable,
  DUPLICATE_REQUEST: Code.AlreadyExists,
  DEADLINE_PASSED: Code.DeadlineExceeded,
  ENVIRONMENT_FAILED: Code.Internal,
  ENGINE_FAILED: Code.Unavailable,
  NOT_SUPPORTED: Code.Unimplemented,
  CONTRACT_MISMATCH: Code.FailedPrecondition,
  INTERNAL: Code.Internal,
} satisfies Partial<Record<keyof typeof Reason, Code>>;

export type ReasonName = keyof typeof CODES;

export interface Violation {
  /** Path of the field in the request. */
  field: string;
  /** What it must be. */
  description: string;
}

/** Makes the error that ends a call. `retryAfterS` says when to come again, `fields` every field that is at fault. */
export function refusal(
  reason: ReasonName,
  message: string,
  more: { retryAfterS?: number; fields?: readonly Violation[] } = {},
): ConnectError {
  const details: ConstructorParameters<typeof ConnectError>[3] = [
    { desc: ErrorInfoSchema, value: { reason, domain: ERROR_DOMAIN } },
  ];
  if (more.fields?.length) {
    const fieldViolations = more.fields
      .slice(0, MAX_FIELDS)
      .map(({ field, description }) => ({ field: cut(field, 60), description: cut(description, 120) }));
    details.push({ desc: BadRequestSchema, value: { fieldViolations } });
  }
  if (more.retryAfterS !== undefined) {
    const seconds = Math.floor(more.retryAfterS);
    const nanos = Math.round((more.retryAfterS - seconds) * 1e9);
    const retryDelay = create(DurationSchema, { seconds: BigInt(seconds), nanos });
    details.push({ desc: RetryInfoSchema, value: { retryDelay } });
  }
  return new ConnectError(cut(message, MAX_MESSAGE_CHARS), CODES[reason], undefined, details);
}

/** What any error becomes at the door of a server: a refusal as it is, anything else an INTERNAL one. */
export function atTheDoor(error: unknown): ConnectError {
  if (error instanceof ConnectError) return error;
  return refusal("INTERNAL", error instanceof Error ? error.message : String(error));
}

function cut(text: string, most: number): string {
  return text.length <= most ? text : `${text.slice(0, most - 3)}...`;
}
