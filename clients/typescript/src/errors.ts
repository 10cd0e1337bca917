/** Errors as docs/contract.md has them: a gRPC status with google.rpc details, of which a reason is the one to go by. */

import { ConnectError } from "@connectrpc/connect";
import { ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";

export const ERROR_DOMAIN = "meshrl";

/** The reason of an error that a server ended a call with; empty where it gave none. */
export function reasonOf(error: unknown): string {
  if (!(error instanceof ConnectError)) return "";
  return error.findDetails(ErrorInfoSchema).find((info) => info.domain === ERROR_DOMAIN)?.reason ?? "";
}
