/** node serve.js --hub HOST:PORT [--port N] [--host H] [--slots N]: hosts reverse_text_ts. */

import { parseArgs } from "node:util";
import { reverseText } from "./reverseText.js";
import { serve } from "./serving/server.js";

const { values } = parseArgs({
  options: {
    hub: { type: "string" },
    port: { type: "string", default: "50061" },
    host: { type: "string", default: "127.0.0.1" },
    slots: { type: "string", default: "64" },
  },
});
if (!values.hub) {
  console.error("Error: --hub must name the weight hub of the run, such as 127.0.0.1:50053");
  process.exit(2);
}
const environment = reverseText();
const server = await serve({
  environments: [environment],
  hub: values.hub,
  host: values.host,
  port: Number(values.port),
  slots: Number(values.slots),
});
console.log(`serving ${environment.name} on port ${server.port}`);
process.on("SIGTERM", () => void server.drain(5_000).then(() => process.exit(0)));
process.on("SIGINT", () => void server.drain(0).then(() => process.exit(0)));
