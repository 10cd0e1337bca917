/** The vectors of proto/vectors, computed from docs/contract.md. MESHRL_VECTORS names their folder. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { createRegistry, fromBinary, fromJson, toBinary } from "@bufbuild/protobuf";
import { pathToString } from "@bufbuild/protobuf/reflect";
import { createValidator } from "@bufbuild/protovalidate";
import { blake3 } from "@noble/hashes/blake3.js";
import { decompress } from "fzstd";
import { file_meshrl_v1_exchange } from "meshrl-client/gen/meshrl/v1/exchange_pb.js";
import { file_meshrl_v1_identity } from "meshrl-client/gen/meshrl/v1/identity_pb.js";
import { file_meshrl_v1_rollout } from "meshrl-client/gen/meshrl/v1/rollout_pb.js";
import { file_meshrl_v1_trainer } from "meshrl-client/gen/meshrl/v1/trainer_pb.js";
import { file_meshrl_v1_weights, ManifestSchema, type Manifest } from "meshrl-client/gen/meshrl/v1/weights_pb.js";

const FOLDER = process.env["MESHRL_VECTORS"] ?? "../../proto/vectors";
const vectors = (name: string): any => JSON.parse(readFileSync(join(FOLDER, name), "utf8"));
const hex = (bytes: Uint8Array): string => Buffer.from(bytes).toString("hex");
const unhex = (text: string): Uint8Array => Uint8Array.from(Buffer.from(text, "hex"));
const digest = (...parts: Uint8Array[]): string => hex(blake3(Buffer.concat(parts)));

type Element = "u64" | "i64" | "i32" | "f32" | "f64" | "bool";

/** Numbers as little-endian bytes. */
function le(kind: Element, ...values: (number | bigint | boolean)[]): Uint8Array {
  const width = { u64: 8, i64: 8, i32: 4, f32: 4, f64: 8, bool: 1 }[kind];
  const view = new DataView(new ArrayBuffer(width * values.length));
  values.forEach((value, place) => {
    const at = place * width;
    if (kind === "u64") view.setBigUint64(at, BigInt(value), true);
    else if (kind === "i64") view.setBigInt64(at, BigInt(value), true);
    else if (kind === "i32") view.setInt32(at, Number(value), true);
    else if (kind === "f32") view.setFloat32(at, Number(value), true);
    else if (kind === "f64") view.setFloat64(at, Number(value), true);
    else view.setUint8(at, Number(value));
  });
  return new Uint8Array(view.buffer);
}

/** Canonical fields: text, integers, shapes and bytes. */
function fields(...values: (string | number | bigint | readonly (number | bigint)[] | Uint8Array)[]): Uint8Array {
  const parts = values.map((value) => {
    if (typeof value === "string") return new TextEncoder().encode(value);
    if (value instanceof Uint8Array) return value;
    return Array.isArray(value) ? le("i64", ...value) : le("i64", value as number);
  });
  return Buffer.concat(parts.flatMap((part) => [le("u64", part.length), part]));
}

const U64 = (value: bigint): bigint => BigInt.asUintN(64, value);

function sum128(bytes: Uint8Array, first: number): string {
  const even = bytes.length % 2 ? Buffer.concat([bytes, new Uint8Array(1)]) : Buffer.from(bytes);
  let [lane0, lane1] = [0n, 0n];
  for (let at = 0; at < even.length; at += 2) {
    let z = U64(BigInt(even.readUInt16LE(at)) + (BigInt(first) + BigInt(at / 2) + 1n) * 0x9e3779b97f4a7c15n);
    z = U64((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = U64((z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    z ^= z >> 31n;
    lane0 = U64(lane0 + z);
    lane1 = U64(lane1 + (z ^ (z >> 29n)) * 0xd6e8feb86659fd93n);
  }
  return hex(le("u64", lane0, lane1));
}

function crc32c(bytes: Uint8Array): number {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit += 1) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1;
  }
  return ~crc >>> 0;
}

type Entry = [string, string, number[], string?];

function hashed(domain: string, tensors: Entry[]): string {
  const sorted = [...tensors].sort(([a], [b]) => (a < b ? -1 : 1));
  const parts = sorted.map(([name, dtype, shape, root]) =>
    root === undefined ? fields(name, dtype, shape) : fields(name, dtype, shape, unhex(root)),
  );
  return digest(fields(domain), ...parts);
}

const ALWAYS: [string, string, Element][] = [
  ["token_ids", "int32", "i32"],
  ["position_ids", "int32", "i32"],
  ["loss_mask", "bool", "bool"],
  ["advantages", "float32", "f32"],
  ["inference_logprobs", "float32", "f32"],
  ["sample_offsets", "int64", "i64"],
  ["temperatures", "float32", "f32"],
  ["env_index", "int32", "i32"],
];
const IF_SET = ["rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs"];

function batchDigest(rows: Record<string, number[]>[]): string {
  const tensor = (dtype: string, kind: Element, values: number[]): Uint8Array =>
    Buffer.concat([fields(dtype), le("u64", 1), le("i64", values.length), fields(le(kind, ...values))]);
  const parts = rows.flatMap((row) => [
    ...ALWAYS.map(([name, dtype, kind]) => tensor(dtype, kind, row[name] ?? [])),
    ...IF_SET.flatMap((name) => (row[name] ? [fields(name), tensor("float32", "f32", row[name])] : [])),
  ]);
  return digest(new TextEncoder().encode("meshrl.batch.v1"), le("u64", rows.length), ...parts);
}

test("digests", () => {
  const found = vectors("digests.json");
  for (const each of found.blake3) assert.equal(digest(unhex(each.bytes)), each.digest);
  for (const each of found.crc32c) assert.equal(crc32c(unhex(each.bytes)), each.crc32c);
  for (const each of found.sum128) assert.equal(sum128(unhex(each.bytes), each.first_word), each.digest);
  for (const each of found.layout_signature) assert.equal(hashed("meshrl.layout.v1", each.tensors), each.signature);
  for (const each of found.result_root) assert.equal(hashed("meshrl.root.v1", each.tensors), each.root);
  for (const each of found.batch_digest) assert.equal(batchDigest(each.micro_batches), each.digest);
});

const DTYPES = [
  "", "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3",
  "float8_e5m2",
];

function artifactId(m: Manifest): string {
  const kinds = ["", "full", "delta", "lora"];
  const transports = ["", "filesystem", "stream", "nccl"];
  const parts = [
    fields("meshrl.manifest.v1", m.runId, m.epoch, m.version, kinds[m.kind] ?? "", transports[m.transport] ?? ""),
    fields(m.baseVersion ?? -1n, m.baseRoot, m.resultRoot, m.layoutSignature, m.codec, m.tensors.length),
    ...m.tensors.map((t) => fields(t.name, DTYPES[t.dtype] ?? "", t.shape, t.offset, t.numBytes, t.digest)),
    fields(m.chunks.length),
    ...m.chunks.map((chunk) => fields(chunk.offset, chunk.length, chunk.digest)),
    fields(m.files.length),
    ...m.files.map((file) => fields(file.path, file.offset, file.numBytes)),
  ];
  if (m.digestAlgorithm) parts.push(fields("digest_algorithm", m.digestAlgorithm));
  if (m.collective) {
    const { numSenders, bucketBytes, wholeTensors, reorderedTensors, rowOrder } = m.collective;
    parts.push(fields("collective", numSenders, bucketBytes, wholeTensors));
    if (reorderedTensors.length) parts.push(fields("row_order", reorderedTensors, rowOrder));
  }
  if (m.adapter) {
    const { rank, loraAlpha, baseModel, targetModules } = m.adapter;
    parts.push(fields("adapter", rank, le("f64", loraAlpha), baseModel, targetModules.length, ...targetModules));
  }
  return digest(...parts);
}

test("manifests", () => {
  for (const each of vectors("manifests.json").manifests) {
    const manifest = fromBinary(ManifestSchema, unhex(each.message));
    assert.equal(artifactId(manifest), each.artifact_id);
    assert.equal(hex(toBinary(ManifestSchema, manifest)), each.message);
  }
});

for (const name of ["deltas.json", "sparse_deltas.json"]) {
  test(`the delta of ${name} leads from its base to its result`, () => leads(name));
}

function leads(name: string): void {
  const { tensors, result, delta } = vectors(name);
  const [, , , offset, size] = tensors.at(-1);
  const base = Buffer.from(Array.from({ length: offset + size }, (_, at) => (at >= 4 && at < 8 ? 0 : (37 * at) % 251)));
  const stream = Buffer.from(base);
  const bytes = Buffer.from(unhex(delta));
  assert.equal(bytes.toString("latin1", 0, 4), "MRDL");
  const pieces = Number(bytes.readBigUInt64LE(8));
  let frame = 16 + 48 * pieces;
  for (let piece = 0; piece < pieces; piece += 1) {
    const at = 16 + 48 * piece;
    const first = Number(bytes.readBigUInt64LE(at));
    const width = bytes.readUInt16LE(at + 24);
    const lowBits = bytes.readUInt16LE(at + 26);
    const [gaps, steps, escapes] = [36, 40, 44].map((part) => {
      const length = bytes.readUInt32LE(at + part);
      frame += length;
      return length ? Buffer.from(decompress(bytes.subarray(frame - length, frame))) : Buffer.alloc(0);
    }) as [Buffer, Buffer, Buffer];
    const lows = bytes.subarray(frame, lowBits ? frame + steps.length : frame);
    frame += lows.length;
    let [place, gap, escape, low] = [0, 0, 0, 0];
    for (const small of steps) {
      for (; gaps[gap] === 255; gap += 1) place += 255 << lowBits;
      place += ((gaps[gap++] ?? 0) << lowBits) + (lows[low++] ?? 0);
      let zigzag = BigInt(small) + 1n;
      if (small === 255) {
        zigzag = number(escapes.subarray(escape, escape + width)) + 1n;
        escape += width;
      }
      move(stream.subarray(first + place * width, first + (place + 1) * width), (zigzag >> 1n) ^ -(zigzag & 1n));
      place += 1;
    }
  }
  assert.equal(frame, bytes.length);
  const changed = [...stream].flatMap((byte, at) => (byte === base[at] ? [] : [[at, byte]]));
  assert.deepEqual(changed, result);
}

const number = (bytes: Uint8Array): bigint => bytes.reduceRight((sum, byte) => (sum << 8n) | BigInt(byte), 0n);

/** Takes an element a step on in the order of values. */
function move(element: Uint8Array, step: bigint): void {
  const bits = element.length * 8;
  const top = 1n << BigInt(bits - 1);
  let value = number(element);
  value = value & top ? BigInt.asUintN(bits, ~value) : value | top;
  value = BigInt.asUintN(bits, value + step);
  value = value & top ? value ^ top : BigInt.asUintN(bits, ~value);
  element.forEach((_, at) => (element[at] = Number((value >> BigInt(8 * at)) & 255n)));
}

test("completion frames", () => {
  for (const each of vectors("completion_frames.json").frames) {
    const bytes = Buffer.from(unhex(each.bytes));
    assert.equal(bytes.toString("latin1", 0, 4), "MRCF");
    assert.equal(bytes.readUInt32LE(12), each.prompt_tokens);
    const idBytes = bytes.readUInt32LE(16);
    assert.equal(bytes.toString("utf8", 24, 24 + idBytes), each.request_id);
    let at = 24 + Math.ceil(idBytes / 8) * 8;
    const choices = Array.from({ length: bytes.readUInt32LE(8) }, () => {
      const [tokens, spans] = [bytes.readUInt32LE(at), bytes.readUInt32LE(at + 4)];
      const stop = Number(bytes.readBigInt64LE(at + 8));
      const [reason, what] = [bytes[at + 16] ?? 0, bytes[at + 17] ?? 0];
      at += 24;
      const list = <T>(count: number, width: number, one: (at: number) => T): T[] => {
        at += count * width;
        return Array.from({ length: count }, (_, place) => one(at - (count - place) * width));
      };
      const version = (place: number): number => Number(bytes.readBigInt64LE(place));
      const span = (place: number) => [bytes.readUInt32LE(place), bytes.readUInt32LE(place + 4), version(place + 8)];
      const floats = (is: number) => (is ? list(tokens, 4, (place) => bytes.readFloatLE(place)) : null);
      return {
        version_spans: list(spans, 16, span),
        prompt_version: what & 4 ? (list(1, 8, version)[0] ?? null) : null,
        token_ids: list(tokens, 4, (place) => bytes.readInt32LE(place)),
        logprobs: floats(what & 1),
        raw_logprobs: floats(what & 2),
        finish_reason: [null, "stop", "length", "abort"][reason],
        stop_token_id: stop < 0 ? null : stop,
      };
    });
    assert.deepEqual(choices, each.choices);
    assert.equal(at, bytes.length);
  }
});

test("requests that break a constraint", () => {
  const registry = createRegistry(
    file_meshrl_v1_exchange, file_meshrl_v1_identity, file_meshrl_v1_rollout, file_meshrl_v1_trainer, file_meshrl_v1_weights,
  );
  const validator = createValidator();
  for (const each of vectors("violations.json").requests) {
    const schema = registry.getMessage(`meshrl.v1.${each.message}`);
    assert.ok(schema, each.message);
    const found = validator.validate(schema, fromJson(schema, each.json, { registry }));
    const paths = new Set((found.violations ?? []).map(({ field }) => pathToString(field) || "collective_backend"));
    assert.deepEqual([...paths].sort(), [...each.fields].sort(), JSON.stringify(each));
  }
});
