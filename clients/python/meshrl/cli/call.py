"""`meshrl call`: one raw RPC, with request and answers as JSON."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import click
import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from meshrl.cli.command import CALL_DEADLINE_S, address_option, folder_option, options_for, run, the_address
from meshrl.cli.run_folder import RunFolder
from meshrl.client import ChannelOptions, RolloutClient, TrainerClient, WeightSyncClient
from meshrl.client.credentials import Credentials, default_credentials
from meshrl.client.trust import Role
from meshrl.v1 import rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire.errors import from_rpc_error

SERVICES: dict[str, ServiceDescriptor] = {
    "rollout": rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
    "trainer": trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"],
    "weights": weights_pb2.DESCRIPTOR.services_by_name["WeightSync"],
}

CLIENTS = {client.service: client for client in (RolloutClient, TrainerClient, WeightSyncClient)}


@click.command()
@click.argument("service", type=click.Choice(sorted(SERVICES)))
@click.argument("method")
@click.argument("requests", nargs=-1, metavar="[JSON]...")
@folder_option
@address_option
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=0.1), default=CALL_DEADLINE_S, show_default=True,
              help="Seconds for the whole call.")  # fmt: skip
@click.option("--relay", is_flag=True, help="The address is that of a relay of the weight hub.")
def call(
    service: str,
    method: str,
    requests: tuple[str, ...],
    folder: RunFolder,
    address: str | None,
    deadline_s: float,
    relay: bool,
) -> None:
    """Call METHOD of a service with a request in JSON ({} if left out; - reads one a line), and print the answer.

    Several requests are a stream. Field names are those of proto/: meshrl call trainer GetTrainer
    """
    offered = SERVICES[service].methods_by_name
    if method not in offered:
        raise click.UsageError(f"{SERVICES[service].full_name} has no {method}; it has: {', '.join(offered)}")
    role = Role.RELAY if relay else CLIENTS[SERVICES[service].full_name].server_role
    run(
        _call(
            offered[method],
            the_address(folder, service, address),
            role,
            list(_parsed(offered[method], requests)),
            options_for(folder, unary_deadline_s=deadline_s),
        )
    )


def _parsed(method: MethodDescriptor, requests: tuple[str, ...]) -> Iterator[Message]:
    kind = message_factory.GetMessageClass(method.input_type)
    texts = sys.stdin if requests == ("-",) else requests or ("{}",)
    for text in texts:
        try:
            yield json_format.Parse(text, kind())
        except json_format.ParseError as error:
            raise click.UsageError(f"not a {method.input_type.name}: {error}") from error


async def _call(
    method: MethodDescriptor, address: str, role: str, requests: list[Message], options: ChannelOptions
) -> None:
    if not method.client_streaming and len(requests) != 1:
        raise click.UsageError(f"{method.name} takes one request, got {len(requests)}")
    credentials, deadline_s = options.credentials or default_credentials(), options.unary_deadline_s
    async with credentials.open_channel(address, [], role) as channel:
        pending = start_call(channel, method, requests, deadline_s=deadline_s, credentials=credentials)
        try:
            if not method.server_streaming:
                _print(await pending)
                return
            async for message in pending:
                _print(message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, call=f"{method.full_name} of {address}", deadline_s=deadline_s) from error


def start_call(
    channel: grpc.aio.Channel,
    method: MethodDescriptor,
    requests: Sequence[Message],
    *,
    deadline_s: float | None,
    credentials: Credentials,
) -> Any:
    """The pending call of any RPC. All `requests` are sent if the client streams, else the first."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    answer = message_factory.GetMessageClass(method.output_type)
    stub = getattr(channel, kind)(path, lambda message: message.SerializeToString(), answer.FromString)
    sent = _each(requests) if method.client_streaming else requests[0]
    return stub(sent, timeout=deadline_s, metadata=credentials.metadata())


async def _each(requests: Sequence[Message]) -> AsyncIterator[Message]:
    for request in requests:
        yield request


def _print(message: Message) -> None:
    click.echo(json_format.MessageToJson(message, preserving_proto_field_name=True))
