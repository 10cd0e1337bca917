/** Clients of a mesh; `rollout`, `trainer` and `weights` have the messages. */

export * from "./clients.js";
export * from "./errors.js";
export * from "./tensors.js";
export * as rollout from "./gen/meshrl/v1/rollout_pb.js";
export * as trainer from "./gen/meshrl/v1/trainer_pb.js";
export * as weights from "./gen/meshrl/v1/weights_pb.js";
export { Reason } from "./gen/meshrl/v1/reasons_pb.js";
