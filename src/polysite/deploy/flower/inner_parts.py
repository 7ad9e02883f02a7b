"""Inner parts of Flower that this package uses, in one table.

Flower promises stability for ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp`` only. Everything else that is
used here is listed below, so that ``missing_parts`` can tell which of it a new version of Flower has moved.
"""

from importlib import import_module

INNER_PARTS: tuple[str, ...] = (
    # messages: objects, their names and how they are cut
    "flwr.app.message.arraychunk.ArrayChunk",
    "flwr.app.message.make_message",
    "flwr.app.message.remove_content_from_message",
    "flwr.app.Metadata",
    "flwr.common.serde.message_from_proto",
    "flwr.common.serde.message_to_proto",
    "flwr.supercore.constant.HEAD_BODY_DIVIDER",
    "flwr.supercore.inflatable.inflatable_object.InflatableObject",
    "flwr.supercore.inflatable.inflatable_object.get_all_nested_objects",
    "flwr.supercore.inflatable.inflatable_object.get_object_head_values_from_object_content",
    "flwr.supercore.inflatable.inflatable_object.get_object_id",
    "flwr.supercore.inflatable.inflatable_object.get_object_tree",
    "flwr.supercore.inflatable.inflatable_object.iterate_object_tree",
    "flwr.supercore.inflatable.inflatable_object.no_object_id_recompute",
    "flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents",
    "flwr.supercore.inflatable.inflatable_utils.validate_object_content",
    # the calls of a site
    "flwr.proto.fleet_pb2.ActivateNodeRequest",
    "flwr.proto.fleet_pb2.DeactivateNodeRequest",
    "flwr.proto.fleet_pb2.PullMessagesRequest",
    "flwr.proto.fleet_pb2.PullMessagesResponse",
    "flwr.proto.fleet_pb2.PushMessagesRequest",
    "flwr.proto.fleet_pb2.PushMessagesResponse",
    "flwr.proto.heartbeat_pb2.SendNodeHeartbeatRequest",
    "flwr.proto.message_pb2.ConfirmMessageReceivedRequest",
    "flwr.proto.message_pb2.ObjectTree",
    "flwr.proto.message_pb2.PullObjectRequest",
    "flwr.proto.message_pb2.PullObjectResponse",
    "flwr.proto.message_pb2.PushObjectRequest",
    "flwr.proto.message_pb2.PushObjectResponse",
    "flwr.proto.node_pb2.Node",
    "flwr.supercore.protobuf.client.ProtobufCall",
    "flwr.supercore.protobuf.client.ProtobufRequestContext",
    "flwr.supercore.protobuf.constants.PROTOBUF_MEDIA_TYPE",
    "flwr.supernode.fleet_http_client.FleetHttpClient.ActivateNode",
    "flwr.supernode.fleet_http_client.FleetHttpClient.ConfirmMessageReceived",
    "flwr.supernode.fleet_http_client.FleetHttpClient.DeactivateNode",
    "flwr.supernode.fleet_http_client.FleetHttpClient.PushMessages",
    "flwr.supernode.fleet_http_client.FleetHttpClient.SendNodeHeartbeat",
    "flwr.supernode.fleet_http_client.FleetHttpClient._send",
    "flwr.supernode.fleet_http_client.FleetHttpClient.close",
    "flwr.supernode.node_auth_http_interceptor.NodeAuthHttpInterceptor",
    # signatures
    "flwr.common.constant.SYSTEM_TIME_TOLERANCE",
    "flwr.common.constant.TIMESTAMP_HEADER",
    "flwr.common.constant.TIMESTAMP_TOLERANCE",
    "flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER",
    "flwr.supercore.constant.FLEET_HTTP_SIGNATURE_HEADER",
    "flwr.supercore.primitives.asymmetric.bytes_to_private_key",
    "flwr.supercore.primitives.asymmetric.bytes_to_public_key",
    "flwr.supercore.primitives.asymmetric.public_key_to_bytes",
    "flwr.supercore.primitives.asymmetric.verify_signature",
    # the SuperLink and what it keeps
    "flwr.common.constant.NOOP_ACCOUNT_NAME",
    "flwr.common.constant.NOOP_FLWR_AID",
    "flwr.common.constant.SUPERLINK_NODE_ID",
    "flwr.supercore.constant.NOOP_FEDERATION_ID",
    "flwr.supercore.constant.NodeStatus.ONLINE",
    "flwr.supercore.constant.TaskType.SERVER_APP",
    "flwr.supercore.corestate.in_memory_corestate.ObjectPushSession",
    "flwr.supercore.date.now",
    "flwr.superlink.main.create_app",
    *(
        f"flwr.server.superlink.linkstate.in_memory_linkstate.InMemoryLinkState.{name}"
        for name in (
            "_cleanup_push_session",
            "acknowledge_node_heartbeat",
            "activate_task",
            "claim_task",
            "create_node",
            "create_run",
            "deactivate_node",
            "delete_messages",
            "get_node_info",
            "get_tasks",
            "object_store",
            "store_message_ins",
            "store_object",
        )
    ),
    *(
        f"flwr.supercore.object_store.in_memory_object_store.InMemoryObjectStore.{name}"
        for name in ("delete", "get", "preregister", "put")
    ),
)
# attributes that exist only in an object: "instance" is a state or store of ``create_app``
STATE_ATTRIBUTES = (
    "_lock_object_push_sessions",
    "_object_push_session_by_root",
    "_object_push_sessions",
    "lock",
    "message_ins_id_to_message_res_id",
    "message_ins_store",
    "message_res_store",
    "task_token_store",
)
STORE_ATTRIBUTES = ("lock_store", "store", "verify")


def missing_parts() -> list[str]:
    """Return the inner parts that the installed Flower does not have."""
    missing = [part for part in INNER_PARTS if not _exists(part)]
    if missing:
        return missing
    from flwr.superlink.main import create_app

    state = create_app().state.linkstate_factory.state()
    objects = (("state", state, STATE_ATTRIBUTES), ("state.object_store", state.object_store, STORE_ATTRIBUTES))
    return [f"{what}.{name}" for what, each, names in objects for name in names if not hasattr(each, name)]


def _exists(part: str) -> bool:
    names = part.split(".")
    for k in range(len(names) - 1, 0, -1):
        try:
            value = import_module(".".join(names[:k]))
        except ModuleNotFoundError:
            continue
        for name in names[k:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False
