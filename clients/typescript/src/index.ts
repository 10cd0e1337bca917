/** Clients of a mesh and a server for environments; the messages are in `messages`, by service. */

export * from "./clients.js";
export * from "./errors.js";
export * from "./tensors.js";
export * from "./serving/environment.js";
export { serve, type RunningServer, type ServeOptions } from "./serving/server.js";
export { reverseText } from "./environments/reverseText.js";
export * as rollout from "./gen/meshrl/v1/rollout_pb.js";
export * as trainer from "./gen/meshrl/v1/trainer_pb.js";
export * as weights from "./gen/meshrl/v1/weights_pb.js";
export { Reason } from "./gen/meshrl/v1/reasons_pb.js";
