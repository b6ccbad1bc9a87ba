"""A client that knows an address, and learns everything else from the server by reflection."""

from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "k3jax.v1.Decoder"


class Stranger:
    """Calls methods with dictionaries, as grpcurl does with JSON."""

    def __init__(self, channel):
        self._channel = channel
        self._pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        self._methods = self._pool.FindServiceByName(SERVICE).methods_by_name
        self.methods = set(self._methods)

    def __call__(self, name, **fields):
        """A dictionary, or a list of them; field names as in the `.proto`, nothing is left out."""
        method = self._methods[name]
        given = json_format.ParseDict(fields, message_factory.GetMessageClass(method.input_type)())
        kind = "unary_stream" if method.server_streaming else "unary_unary"
        call = getattr(self._channel, kind)(
            f"/{SERVICE}/{name}", request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        if method.server_streaming:
            return [self._plain(message) for message in call(given)]
        return self._plain(call(given))

    def _plain(self, message):
        return json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True,
            descriptor_pool=self._pool,
        )
