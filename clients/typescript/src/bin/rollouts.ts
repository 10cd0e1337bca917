#!/usr/bin/env node
/** meshrl-rollouts ROLLOUT_ADDRESS --environment NAME [--task N] [--group-size N]: plays a group and prints it. */

import { parseArgs } from "node:util";
import { toJsonString } from "@bufbuild/protobuf";
import { fetchRollouts } from "../clients.js";
import { reasonOf } from "../errors.js";
import { RunRolloutsResponseSchema } from "../gen/meshrl/v1/rollout_pb.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    environment: { type: "string" },
    task: { type: "string", default: "0" },
    "group-size": { type: "string", default: "1" },
    json: { type: "boolean", default: false },
  },
});
const address = positionals[0];
if (!address || !values.environment) {
  console.error("Error: name the service and an environment: meshrl-rollouts 127.0.0.1:50051 --environment reverse_text");
  process.exit(2);
}
try {
  const group = {
    environment: values.environment,
    task: { case: "taskIndex", value: BigInt(values.task) } as const,
    groupSize: Number(values["group-size"]),
  };
  for await (const answer of fetchRollouts(address, group)) {
    const { event } = answer;
    if (values.json) console.log(toJsonString(RunRolloutsResponseSchema, answer, { useProtoFieldName: true }));
    else if (event.case === "rollout") console.log(`reward ${event.value.reward?.toFixed(3) ?? "none"}  ${event.value.completion}`);
    else if (event.case === "failure") console.log(`failed  ${event.value.reason}: ${event.value.message}`);
    else if (event.case === "summary") console.log(`${event.value.finished} finished, ${event.value.failed} failed`);
  }
} catch (error) {
  const reason = reasonOf(error);
  console.error(`Error: ${reason && `${reason}: `}${error instanceof Error ? error.message : String(error)}`);
  process.exit(1);
}
process.exit(0);
