"""The gRPC service `k3jax.v1.Decoder` on top of an engine."""
