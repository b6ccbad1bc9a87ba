"""The service's protocol, `decoder.proto`, and what protoc made of it."""
