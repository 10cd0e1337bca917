"""Server reflection for tools such as `buf curl` and `grpcurl`, as grpc.reflection.v1 and, with the same messages,
v1alpha, which older tools know and for which alone the library has code."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as V1ALPHA
from grpc_reflection.v1alpha.reflection import aio

V1 = V1ALPHA.replace("v1alpha", "v1")


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Of `services` (full names) and of itself; before the server starts."""
    describe_v1()
    servicer = aio.ReflectionServicer((*services, V1, V1ALPHA))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1, V1ALPHA):
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))


def describe_v1() -> None:
    name = reflection_pb2.DESCRIPTOR.name.replace("v1alpha", "v1")
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(name)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        renamed = text_format.MessageToString(file).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()).SerializeToString())
