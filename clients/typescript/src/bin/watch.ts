#!/usr/bin/env node
/** meshrl-watch TRAINER_ADDRESS [--json] [--count N]: the steps of a run as they are trained. */

import { parseArgs } from "node:util";
import { toJsonString } from "@bufbuild/protobuf";
import { watchSteps } from "../clients.js";
import { StepState, WatchStepsResponseSchema } from "../gen/meshrl/v1/trainer_pb.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { json: { type: "boolean", default: false }, count: { type: "string" } },
});
const address = positionals[0];
if (!address) {
  console.error("Error: name the trainer: meshrl-watch 127.0.0.1:50052 [--json] [--count N]");
  process.exit(2);
}
let done = 0;
try {
  for await (const event of watchSteps(address)) {
    if (values.json) console.log(toJsonString(WatchStepsResponseSchema, event, { useProtoFieldName: true }));
    else if (event.state === StepState.DONE || event.state === StepState.FAILED) console.log(lineOf(event));
    if (event.state === StepState.DONE) done += 1;
    if (values.count && done >= Number(values.count)) break;
  }
} catch (error) {
  console.error(`Error: the trainer at ${address}: ${error instanceof Error ? error.message : String(error)}`);
  process.exit(1);
}
process.exit(0);

function lineOf(event: import("../gen/meshrl/v1/trainer_pb.js").WatchStepsResponse): string {
  if (event.state === StepState.FAILED) return `step ${event.step} failed: ${event.reason}: ${event.message}`;
  const figures = Object.entries(event.metrics)
    .filter(([name]) => ["loss/mean", "mismatch_kl/all/mean", "optim/grad_norm"].includes(name))
    .map(([name, value]) => `${name} ${value.toPrecision(4)}`);
  const seconds = event.timingsS["step"];
  return [`step ${event.step}`, seconds === undefined ? "" : `${seconds.toFixed(2)} s`, ...figures].filter(Boolean).join("  ");
}
