// A RolloutService in JavaScript, written from proto/ and docs/contract.md alone: no code of the Python side.
//
//   node server.mjs --port 50061 --hub 127.0.0.1:50053 [--proto ../../../proto] [--slots 64]
//
// It hosts one environment, `copy`: the prompt is four tokens, and the reward is the share of sampled tokens that are
// among them. The engines are those that the weight hub lists; each rollout is one call of /inference/v1/generate.

import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import path from "node:path";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const here = path.dirname(fileURLToPath(import.meta.url));
const { values: flags } = parseArgs({
  options: {
    port: { type: "string", default: "0" },
    hub: { type: "string" },
    proto: { type: "string", default: path.join(here, "../../../proto") },
    slots: { type: "string", default: "64" },
  },
});
const options = { keepCase: true, longs: Number, enums: String, arrays: true, oneofs: true, includeDirs: [flags.proto, here] };
const api = grpc.loadPackageDefinition(
  loader.loadSync(["meshrl/v1/rollout.proto", "meshrl/v1/weights.proto", "health.proto"], options),
);
const details = protobuf.loadSync(path.join(here, "status.proto"));

const CONTRACT = "1.0";
const SERVICE = "meshrl.v1.RolloutService";
const ENVIRONMENT = "copy";
const TASKS = 1000;
const DEFAULTS = { temperature: 1.0, max_tokens: 8 };
const hub = new api.meshrl.v1.WeightSync(flags.hub, grpc.credentials.createInsecure());

// --- errors: a status with google.rpc details, as docs/contract.md says ------------------------------------------

class Refusal extends Error {
  constructor(code, reason, message, retryAfterS) {
    super(message);
    Object.assign(this, { code, reason, retryAfterS });
  }

  toStatus() {
    const packed = (name, fields) => ({
      typeUrl: `type.googleapis.com/google.rpc.${name}`,
      value: details.lookupType(`google.rpc.${name}`).encode(fields).finish(),
    });
    const parts = [packed("ErrorInfo", { reason: this.reason, domain: "meshrl" })];
    if (this.retryAfterS) {
      const seconds = Math.floor(this.retryAfterS);
      parts.push(packed("RetryInfo", { retryDelay: { seconds, nanos: Math.round((this.retryAfterS - seconds) * 1e9) } }));
    }
    const status = details.lookupType("google.rpc.Status");
    const metadata = new grpc.Metadata();
    const encoded = status.encode({ code: this.code, message: this.message, details: parts }).finish();
    metadata.set("grpc-status-details-bin", Buffer.from(encoded));
    return { code: this.code, details: this.message, metadata };
  }
}

const asStatus = (error) =>
  error instanceof Refusal ? error.toStatus() : new Refusal(grpc.status.INTERNAL, "INTERNAL", String(error)).toStatus();

const unary = (work) => (call, answer) => {
  Promise.resolve()
    .then(() => work(call.request))
    .then((response) => answer(null, response), (error) => answer(asStatus(error)));
};

// --- engines ------------------------------------------------------------------------------------------------------

let engines = [];
let turn = 0;

async function refreshEngines() {
  const listed = await new Promise((resolve) => hub.ListEngines({}, { deadline: Date.now() + 2000 }, (error, response) => resolve(error ? [] : response.engines)));
  engines = await Promise.all(
    listed.filter((engine) => engine.routable).map(async (engine) => {
      const url = engine.url.replace(/\/$/, "");
      try {
        const answer = await fetch(`${url}/version`, { signal: AbortSignal.timeout(2000) });
        const { version, logprobs_mode } = await answer.json();
        return { url, healthy: true, version, in_flight: 0, logprobs_mode };
      } catch {
        return { url, healthy: false, in_flight: 0 };
      }
    }),
  );
}

async function engineFor(minVersion) {
  const fits = () => engines.filter((engine) => engine.healthy && engine.version !== null && engine.version >= minVersion);
  if (!fits().length) await refreshEngines();
  const found = fits();
  if (!found.length) {
    throw new Refusal(grpc.status.FAILED_PRECONDITION, "VERSION_NOT_AVAILABLE", `no engine serves version ${minVersion}`, 0.2);
  }
  return found[turn++ % found.length];
}

// --- rollouts -----------------------------------------------------------------------------------------------------

const seen = new Set();
const groups = new Map(); // group_id -> { ending: AbortController, left: rollouts that run }
const status = { running: 0, finished: 0, failures: {}, ends: [] };
let draining = false;

function promptOf(task) {
  let state = (task + 1) * 2654435761;
  return Array.from({ length: 4 }, () => {
    state = (Math.imul(state ^ (state >>> 15), 2246822507) + 3266489909) >>> 0;
    return 8 + (state % 24);
  });
}

function tensor(dtype, values) {
  return { dtype, shape: [values.length], data: Buffer.from(values.buffer, values.byteOffset, values.byteLength) };
}

async function play(request, place, sampling, signal) {
  const began = performance.now();
  const prompt = promptOf(Number(request.task_index));
  const engine = await engineFor(Number(request.min_version ?? 0));
  const params = { top_p: 1.0, top_k: -1, min_p: 0.0, ...sampling, logprobs: 1 };
  delete params.stop_token_ids;
  if (params.seed !== undefined) params.seed += place;
  const headers = { "Content-Type": "application/json" };
  if (process.env.MESHRL_API_KEY) headers.Authorization = `Bearer ${process.env.MESHRL_API_KEY}`;
  const answer = await fetch(`${engine.url}/inference/v1/generate`, {
    method: "POST", headers, signal, body: JSON.stringify({ token_ids: prompt, sampling_params: params }),
  });
  if (!answer.ok) throw new Refusal(grpc.status.UNAVAILABLE, "ENGINE_FAILED", `${engine.url}: ${await answer.text()}`);
  const [choice] = (await answer.json()).choices;
  const packed = Buffer.from(choice.completion_logprobs.data, "base64");
  const sampled = choice.token_ids;
  const tokens = Int32Array.from([...prompt, ...sampled]);
  const mask = Uint8Array.from(tokens, (_, index) => (index >= prompt.length ? 1 : 0));
  const logprobs = new Float32Array(tokens.length);
  sampled.forEach((_, index) => (logprobs[prompt.length + index] = packed.readFloatLE(4 * index)));
  const seconds = (performance.now() - began) / 1000;
  const reward = sampled.filter((token) => prompt.includes(token)).length / Math.max(1, sampled.length);
  return {
    rollout_id: randomUUID(),
    group_id: request.group_id,
    task_key: String(request.task_index),
    environment: ENVIRONMENT,
    samples: [
      {
        token_ids: tensor("DATA_TYPE_INT32", tokens),
        loss_mask: tensor("DATA_TYPE_BOOL", mask),
        logprobs: tensor("DATA_TYPE_FLOAT32", logprobs),
        version_spans: choice.version_spans.map(([start, end, version]) => ({
          start: start + prompt.length, end: end + prompt.length, version,
        })),
        message_spans: [
          { start: 0, end: prompt.length, role: "user" },
          { start: prompt.length, end: tokens.length, role: "assistant" },
        ],
        temperature: params.temperature,
      },
    ],
    reward,
    reward_parts: { copied: reward },
    finish_reason: choice.finish_reason ?? "",
    truncated: choice.finish_reason === "length",
    num_turns: 1,
    timings_s: { generation: seconds, total: seconds },
    completion: sampled.join(" "),
  };
}

function check(request) {
  const bad = (message) => new Refusal(grpc.status.INVALID_ARGUMENT, "INVALID_REQUEST", message);
  if (draining) throw new Refusal(grpc.status.UNAVAILABLE, "DRAINING", "this server is draining");
  if (!request.request_id || !request.group_id) throw bad("request_id and group_id must be given");
  if (!(request.group_size >= 1)) throw bad("group_size must be at least 1");
  if (!(request.deadline_s > 0)) throw bad("deadline_s must be positive");
  if (request.environment !== ENVIRONMENT) {
    throw new Refusal(grpc.status.NOT_FOUND, "UNKNOWN_ENVIRONMENT", `no environment ${request.environment}; hosted is ${ENVIRONMENT}`);
  }
  if (!(Number(request.task_index) < TASKS)) throw new Refusal(grpc.status.NOT_FOUND, "UNKNOWN_TASK", `there are ${TASKS} tasks`);
  if (seen.has(request.request_id) || groups.has(request.group_id)) {
    throw new Refusal(grpc.status.ALREADY_EXISTS, "DUPLICATE_REQUEST", "this request or its group is known");
  }
  if (request.exact_version !== undefined) throw bad("this server takes min_version only");
  if (status.running + request.group_size > Number(flags.slots)) {
    throw new Refusal(grpc.status.RESOURCE_EXHAUSTED, "OVERLOADED", `${status.running} of ${flags.slots} rollouts run`, 0.5);
  }
}

async function runRollouts(call) {
  const request = call.request;
  try {
    check(request);
    await engineFor(Number(request.min_version ?? 0));
    check(request); // another group may have come meanwhile
  } catch (error) {
    call.emit("error", asStatus(error));
    return;
  }
  seen.add(request.request_id);
  setTimeout(() => seen.delete(request.request_id), 600_000).unref();
  const ending = new AbortController();
  const group = { ending, left: request.group_size };
  groups.set(request.group_id, group);
  const late = setTimeout(() => ending.abort("late"), request.deadline_s * 1000);
  call.on("cancelled", () => ending.abort("cancelled"));
  status.running += request.group_size;
  const given = Object.fromEntries(Object.entries(request.sampling ?? {}).filter(([name, value]) => !name.startsWith("_") && value !== null));
  const sampling = { ...DEFAULTS, ...given };
  const counts = { finished: 0, failed: 0, cancelled: 0, sampled_tokens: 0 };
  const one = async (place) => {
    try {
      const rollout = await play(request, place, sampling, ending.signal);
      counts.finished += 1;
      counts.sampled_tokens += rollout.samples[0].token_ids.shape[0] - 4;
      status.finished += 1;
      status.ends.push(Date.now());
      call.write({ rollout });
    } catch (error) {
      if (ending.signal.aborted && ending.signal.reason !== "late") {
        counts.cancelled += 1;
      } else {
        const reason = ending.signal.aborted ? "DEADLINE_PASSED" : (error.reason ?? "ENGINE_FAILED");
        counts.failed += 1;
        status.failures[reason] = (status.failures[reason] ?? 0) + 1;
        call.write({ failure: { rollout_id: randomUUID(), group_id: request.group_id, reason, message: String(error), retryable: true } });
      }
    } finally {
      status.running -= 1;
      group.left -= 1;
    }
  };
  await Promise.all(Array.from({ length: request.group_size }, (_, place) => one(place)));
  clearTimeout(late);
  groups.delete(request.group_id);
  call.write({ summary: counts });
  call.end();
}

const rollouts = {
  ListEnvironments: unary(({ contract_version: theirs }) => {
    if (theirs && theirs.split(".")[0] !== CONTRACT.split(".")[0]) {
      throw new Refusal(grpc.status.FAILED_PRECONDITION, "CONTRACT_MISMATCH", `this server speaks contract ${CONTRACT}, got ${theirs}`);
    }
    const environment = { name: ENVIRONMENT, taskset: "node-copy", num_tasks: TASKS, default_sampling: DEFAULTS };
    return { contract_version: CONTRACT, environments: [environment] };
  }),
  RunRollouts: runRollouts,
  CancelRollouts: unary(({ group_ids }) => {
    const named = [...groups].filter(([id]) => !group_ids.length || group_ids.includes(id)).map(([, group]) => group);
    for (const group of named) group.ending.abort("cancelled");
    return { cancelled: named.reduce((sum, group) => sum + group.left, 0) };
  }),
  GetRolloutStatus: unary(() => {
    status.ends = status.ends.filter((end) => end > Date.now() - 60_000);
    const { running, finished, failures } = status;
    return { running, queued: 0, finished, failures, rollouts_per_s: status.ends.length / 60, engines, draining };
  }),
};

const health = ({ service }) => {
  if (service !== "" && service !== SERVICE) throw new Refusal(grpc.status.NOT_FOUND, "NOT_SUPPORTED", `no service ${service}`);
  return { status: draining ? "NOT_SERVING" : "SERVING" };
};

const server = new grpc.Server({ "grpc.max_receive_message_length": 64 * 2 ** 20, "grpc.max_send_message_length": 64 * 2 ** 20 });
server.addService(api.meshrl.v1.RolloutService.service, rollouts);
server.addService(api.grpc.health.v1.Health.service, { Check: unary(health), Watch: (call) => call.write(health(call.request)) });
server.bindAsync(`127.0.0.1:${flags.port}`, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(`serving ${ENVIRONMENT} on port ${port}`);
});
setInterval(refreshEngines, 1000);

process.on("SIGTERM", () => {
  draining = true;
  server.tryShutdown(() => process.exit(0));
  setTimeout(() => process.exit(0), 5000).unref();
});
