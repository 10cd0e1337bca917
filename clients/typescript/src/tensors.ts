/** Arrays in messages: little-endian bytes in C order, as tensor.proto says. */

import { create } from "@bufbuild/protobuf";
import { DataType, TensorSchema, type Tensor } from "./gen/meshrl/v1/tensor_pb.js";

const WIDTHS = new Map<DataType, number>([
  [DataType.BOOL, 1],
  [DataType.INT32, 4],
  [DataType.FLOAT32, 4],
]);

/** A tensor of shape (T,). */
export function encodeTensor(dtype: DataType, values: readonly number[]): Tensor {
  const width = widthOf(dtype);
  const bytes = new Uint8Array(values.length * width);
  const view = new DataView(bytes.buffer);
  values.forEach((value, place) => {
    if (dtype === DataType.BOOL) view.setUint8(place, value ? 1 : 0);
    else if (dtype === DataType.INT32) view.setInt32(place * width, value, true);
    else view.setFloat32(place * width, value, true);
  });
  return create(TensorSchema, { dtype, shape: [BigInt(values.length)], data: bytes });
}

/** The values of a tensor, in C order. Throws for a type that rollouts do not have, or bytes that do not fit the shape. */
export function decodeTensor(tensor: Tensor): number[] {
  const width = widthOf(tensor.dtype);
  const count = tensor.shape.reduce((product, length) => product * Number(length), 1);
  if (tensor.data.length !== count * width) {
    throw new Error(`a tensor of shape (${tensor.shape.join(", ")}) has ${tensor.data.length} bytes, not ${count * width}`);
  }
  const view = new DataView(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength);
  return Array.from({ length: count }, (_, place) => {
    if (tensor.dtype === DataType.BOOL) return view.getUint8(place);
    if (tensor.dtype === DataType.INT32) return view.getInt32(place * width, true);
    return view.getFloat32(place * width, true);
  });
}

function widthOf(dtype: DataType): number {
  const width = WIDTHS.get(dtype);
  if (width === undefined) throw new Error(`tensors of type ${DataType[dtype]} are not part of a rollout`);
  return width;
}
