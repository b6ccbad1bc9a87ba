"""The engine: one thread that owns JAX and serves many requests at once; no text and no network here.

`engine.Engine` is the way in, `config.EngineConfig` its settings, `request` what goes in and comes out.
"""
